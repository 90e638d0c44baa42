// Hears of a parameter's gradients while backward goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::intercept {

// Calls back whenever a backward pass has added to a parameter's gradient: once a pass, however
// often the parameter was used.
//
// Ownership: shares the parameter and keeps its gradient accumulator alive, which nobody else does
// between passes. Threading: calls come from autograd's threads; make and destroy it between
// passes. What the callback throws comes out of backward().
class GradientHook {
 public:
  // `arrived` is autograd's own hold of what was added; it may share the gradient's memory.
  using Callback = std::function<void(const at::Tensor& arrived)>;

  GradientHook(const at::Tensor& parameter, Callback callback);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  // False once the parameter was moved to another device or dtype: LibTorch then drops the
  // accumulator, and the hook with it.
  bool hears() const;

  // From now on a backward pass that reaches the parameter throws a UsageError with this text,
  // until a hook is made for it again: nobody sums its gradient over the ranks.
  static void refuse_gradients(const at::Tensor& parameter, const std::string& reason);

  // Whether a hook of anybody's hears of the parameter's gradients now. Hooks that users put on a
  // tensor themselves are others.
  static bool is_heard(const at::Tensor& parameter);

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  at::Tensor parameter_;
  Accumulator accumulator_;
  std::uintptr_t key_ = 0;
};

// Whether nothing else uses a gradient's memory. Autograd hands a gradient on without a copy where
// nobody else has that tensor; but views of its memory may be the gradient of another parameter, or
// be read by what backward still has to do. `arrived` is what the hook was told.
bool is_sole_user(const at::Tensor& gradient, const at::Tensor& arrived);

}  // namespace lockstep::intercept
