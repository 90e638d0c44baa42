#include <lockstep/nn/silu_multiply.h>

#include <spdlog/fmt/ranges.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/device/parallel_pieces.h>
#include <lockstep/nn/activation_kernels.h>
#include <lockstep/nn/once_differentiable.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class SiluMultiply : public torch::autograd::Function<SiluMultiply> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate,
                            const at::Tensor& up) {
    context->save_for_backward({gate, up});
    auto y = at::empty_like(gate);
    const float* gates = gate.data_ptr<float>();
    const float* ups = up.data_ptr<float>();
    auto* to = y.data_ptr<float>();
    device::parallel_pieces(
        gate.numel(), internal::kActivationGrain, [&](std::int64_t begin, std::int64_t end) {
          internal::silu_multiply(gates + begin, ups + begin, to + begin, end - begin);
        });
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    internal::refuse_double_backward("silu_multiply");
    const auto saved = context->get_saved_variables();
    const auto grad = grads[0].contiguous();
    auto grad_gate = at::empty_like(saved[0]);
    auto grad_up = at::empty_like(saved[1]);
    const float* gates = saved[0].data_ptr<float>();
    const float* ups = saved[1].data_ptr<float>();
    const float* from = grad.data_ptr<float>();
    auto* to_gate = grad_gate.data_ptr<float>();
    auto* to_up = grad_up.data_ptr<float>();
    device::parallel_pieces(
        grad.numel(), internal::kActivationGrain, [&](std::int64_t begin, std::int64_t end) {
          internal::silu_multiply_backward(gates + begin, ups + begin, from + begin,
                                           to_gate + begin, to_up + begin, end - begin);
        });
    return {grad_gate, grad_up};
  }
};

bool ours_and_dense(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
}

}  // namespace

at::Tensor silu_multiply(const at::Tensor& gate, const at::Tensor& up) {
  if (gate.sizes() != up.sizes())
    throw UsageError("silu_multiply: gate has the shape {} and up {}: they must be the same",
                     fmt::join(gate.sizes(), "x"), fmt::join(up.sizes(), "x"));
  if (ours_and_dense(gate) && ours_and_dense(up)) return SiluMultiply::apply(gate, up);
  return at::silu(gate) * up;
}

}  // namespace lockstep::nn
