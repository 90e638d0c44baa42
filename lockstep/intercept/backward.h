// Callbacks from backward passes: before one begins, for each tensor that an operator saves for it,
// and when it has added to a parameter's gradient.
//
// LibTorch's autograd engine tells the first two to itself alone. The first use of either therefore
// makes a subclass of it the default engine, for good, which passes everything on to the engine
// that was there before. This is state of the whole process.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

namespace torch::nn {
class Module;
}

namespace lockstep::intercept {

class GradientHook;

// A backward pass that has not begun yet, as long as a listener is told of it.
class Pass {
 public:
  // The nodes that the pass begins with, and, where it adds to the gradients of given tensors
  // alone, the nodes that do so. Refers to them.
  Pass(std::span<const torch::autograd::Edge> roots, std::span<const torch::autograd::Edge> ends)
      : roots_(roots), ends_(ends) {}

  // Whether it may add to the gradient of one of these, as far as its graph is known by now: a
  // pass within it may have another graph. Looks at every node of the graph.
  bool reaches(std::span<const at::Tensor> parameters) const;
  // The first of these hooks that it may call; null where it calls none of them.
  const GradientHook* reached_of(std::span<const GradientHook* const> hooks) const;

 private:
  using Visit = std::function<bool(const torch::autograd::Node*)>;

  // Visits each node that the pass may run, as far as is known, until `visit` returns true.
  bool any_node(const Visit& visit) const;

  std::span<const torch::autograd::Edge> roots_;
  std::span<const torch::autograd::Edge> ends_;
};

// Called before the first node of every backward pass of the process that adds to gradients. A pass
// within a pass (reentrant checkpoints) is part of the outer one.
//
// Threading: called on the thread that begins the pass. Failure: backward() throws what it throws,
// and the pass does not begin.
class PassListener {
 public:
  virtual ~PassListener() = default;
  virtual void before_pass(const Pass& pass) = 0;
  // Called before the first node of each pass within another, on the thread that runs it.
  virtual void before_inner_pass(const Pass&) {}
};

// The listener is called from now on for as long as it lives; it is not kept alive. Listeners are
// called in the order in which they were added.
void add_pass_listener(const std::shared_ptr<PassListener>& listener);

// Makes a pair of hooks for each tensor that is saved: `pack` is given the tensor, and autograd
// keeps the hooks in its place; `unpack` returns it in backward, on the thread that runs there.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

// While it lives, tensors that operators on this thread save go through these hooks. Scopes nest,
// and the innermost counts.
//
// Ownership: refers to `hooks`. Threading: belongs to the thread it was made on. Failure:
// UsageError where the default engine was not LibTorch's own, as in Python.
class HookScope {
 public:
  explicit HookScope(SavedTensorHooks& hooks);
  ~HookScope();
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

 private:
  SavedTensorHooks* outer_;
};

// Calls back when a backward pass has added to a parameter's gradient: once a pass, however often
// the parameter was used.
//
// Ownership: shares the parameter and keeps its gradient accumulator alive, which nobody else does
// between passes. Threading: calls come from autograd's threads; make and destroy it between
// passes. Failure: backward() throws what the callback throws.
class GradientHook {
 public:
  // `arrived` is the tensor that was added; it may share the gradient's memory.
  using Callback = std::function<void(const at::Tensor& arrived)>;

  GradientHook(const at::Tensor& parameter, Callback callback);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  // False once the parameter was moved to another device or dtype: LibTorch then drops the
  // accumulator, and the hook with it.
  bool hears() const;
  // Whether a graph leads to it, or whoever else holds the node that calls it.
  bool is_in_graph() const { return accumulator_.use_count() > 1; }

  // From now on a backward pass that reaches the parameter throws a UsageError with this text,
  // until a hook is made for it again: nobody sums its gradient over the ranks.
  static void refuse_gradients(const at::Tensor& parameter, const std::string& reason);

  // Whether any GradientHook hears of the parameter's gradients now. Hooks that users put on the
  // tensor do not count.
  static bool is_heard(const at::Tensor& parameter);

 private:
  friend class Pass;
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  at::Tensor parameter_;
  Accumulator accumulator_;
  std::uintptr_t key_ = 0;
};

// Throws UsageError, naming a parameter, if the model is wrapped already: DDP and every kind of
// sharding wait for gradients in the memory that a parameter has then, and would not see new
// memory. `function` is the function that the user has called.
void refuse_wrapped(const torch::nn::Module& model, const std::string& function);

// Whether nothing else uses a gradient's memory. Autograd passes a gradient on without a copy if no
// one else holds that tensor; but views of its memory may be the gradient of another parameter, or
// may still be read by this backward pass. `arrived` is the tensor that the hook was given.
bool is_sole_user(const at::Tensor& gradient, const at::Tensor& arrived);

}  // namespace lockstep::intercept
