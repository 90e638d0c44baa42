// Marks functions of autograd whose weights' gradients a pipeline may ask for later.
#pragma once

#include <utility>

#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::nn {

// WeightsMayWait<F>::apply(…) is autograd's Function with F's forward and backward. It promises
// that F's backward computes only the gradients for which AutogradContext::needs_input_grad() asks,
// and that it may run twice. pipeline::SplitBackward, which knows it by this name, then asks for
// the gradients of parameters in the second half of a pass, and for the others in the first.
template <typename F>
struct WeightsMayWait : torch::autograd::Function<WeightsMayWait<F>> {
  template <typename... Arguments>
  static auto forward(torch::autograd::AutogradContext* context, Arguments&&... arguments) {
    return F::forward(context, std::forward<Arguments>(arguments)...);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return F::backward(context, std::move(gradients));
  }
};

}  // namespace lockstep::nn
