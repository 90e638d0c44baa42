#include <lockstep/nn/layers/activations.h>

#include <spdlog/fmt/ranges.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/device/parallel_pieces.h>
#include <lockstep/intercept/once_differentiable.h>
#include <lockstep/nn/kernels/cpu/activation_kernels.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <lockstep/nn/kernels/cuda/on_tensors.h>
#endif

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
#ifdef LOCKSTEP_HAVE_CUDA
    if (gate.is_cuda()) {
      cuda::launch_on(gate, [&](CUstream_st* stream) {
        cuda::silu_multiply(cuda::element_of(gate.scalar_type()), gate.numel(), gate.data_ptr(),
                            up.data_ptr(), y.data_ptr(), stream);
      });
      return y;
    }
#endif
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
    intercept::refuse_double_backward("silu_multiply");
    const auto saved = context->get_saved_variables();
    const auto grad = grads[0].contiguous();
    auto grad_gate = at::empty_like(saved[0]);
    auto grad_up = at::empty_like(saved[1]);
#ifdef LOCKSTEP_HAVE_CUDA
    if (grad.is_cuda()) {
      cuda::launch_on(grad, [&](CUstream_st* stream) {
        cuda::silu_multiply_backward(cuda::element_of(grad.scalar_type()), grad.numel(),
                                     saved[0].data_ptr(), saved[1].data_ptr(), grad.data_ptr(),
                                     grad_gate.data_ptr(), grad_up.data_ptr(), stream);
      });
      return {grad_gate, grad_up};
    }
#endif
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
  if (!tensor.is_contiguous()) return false;
#ifdef LOCKSTEP_HAVE_CUDA
  if (cuda::takes(tensor)) return true;
#endif
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat;
}

}  // namespace

at::Tensor silu_multiply(const at::Tensor& gate, const at::Tensor& up) {
  if (gate.sizes() != up.sizes())
    throw UsageError("silu_multiply: gate has the shape {} and up {}: they must be the same",
                     fmt::join(gate.sizes(), "x"), fmt::join(up.sizes(), "x"));
  if (ours_and_dense(gate) && ours_and_dense(up) && gate.scalar_type() == up.scalar_type() &&
      gate.device() == up.device())
    return SiluMultiply::apply(gate, up);
  return at::silu(gate) * up;
}

}  // namespace lockstep::nn
