// What autograd does with the tensors that an operator saves for its backward.
#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace lockstep::activations {

// Makes a pair of hooks for each tensor that is saved: `pack` is given the tensor, and autograd
// keeps the hooks in its place; `unpack` returns it in backward, on the thread that runs there.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

// While it lives, what operators on this thread save goes through these hooks. Scopes nest, and the
// innermost counts.
//
// LibTorch asks its engine for hooks and has no other place for them in C++: the first scope of a
// process makes a subclass of the engine the default one, for good. This is process-wide state.
// Ownership: refers to `hooks`. Threading: belongs to the thread it was made on. Failure:
// UsageError where the default engine is already another than LibTorch's, as in Python.
class HookScope {
 public:
  explicit HookScope(SavedTensorHooks& hooks);
  ~HookScope();
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

 private:
  SavedTensorHooks* outer_;
};

}  // namespace lockstep::activations
