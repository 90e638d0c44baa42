// What LibTorch's autograd engine tells in C++: that a backward pass is about to begin, and which
// tensors an operator saves for its backward.
//
// It tells these to the engine itself and to nobody else. So the first use of either makes a
// subclass of it the default engine, for good, which passes everything on to the one that was there
// before. This is process-wide state.
#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace lockstep::intercept {

// Is told of every backward pass of the process that adds to gradients, before its first node runs.
// A pass within a pass (reentrant checkpoints) is part of the outer one.
//
// Threading: called on the thread that begins the pass. Failure: what it throws comes out of
// backward(), and the pass does not begin.
class PassListener {
 public:
  virtual ~PassListener() = default;
  virtual void before_pass() = 0;
};

// From now on, for as long as the listener lives: it is not kept alive. Listeners are told in the
// order in which they came.
void add_pass_listener(const std::shared_ptr<PassListener>& listener);

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
// Ownership: refers to `hooks`. Threading: belongs to the thread it was made on. Failure:
// UsageError where the default engine was already another than LibTorch's, as in Python.
class HookScope {
 public:
  explicit HookScope(SavedTensorHooks& hooks);
  ~HookScope();
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

 private:
  SavedTensorHooks* outer_;
};

}  // namespace lockstep::intercept
