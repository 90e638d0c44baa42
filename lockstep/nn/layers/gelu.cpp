#include <lockstep/nn/layers/activations.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/device/parallel_pieces.h>
#include <lockstep/intercept/once_differentiable.h>
#include <lockstep/nn/kernels/cpu/activation_kernels.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class Gelu : public torch::autograd::Function<Gelu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t kind) {
    context->save_for_backward({x});
    context->saved_data["kind"] = kind;
    auto y = at::empty_like(x);
    const auto loop =
        static_cast<GeluKind>(kind) == GeluKind::tanh ? internal::gelu_tanh : internal::gelu_erf;
    const float* from = x.data_ptr<float>();
    auto* to = y.data_ptr<float>();
    device::parallel_pieces(
        x.numel(), internal::kActivationGrain,
        [&](std::int64_t begin, std::int64_t end) { loop(from + begin, to + begin, end - begin); });
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    intercept::refuse_double_backward("gelu");
    const auto x = context->get_saved_variables()[0];
    const auto kind = static_cast<GeluKind>(context->saved_data["kind"].toInt());
    const auto grad = grads[0].contiguous();
    auto grad_x = at::empty_like(x);
    const auto loop =
        kind == GeluKind::tanh ? internal::gelu_tanh_backward : internal::gelu_erf_backward;
    const float* values = x.data_ptr<float>();
    const float* from = grad.data_ptr<float>();
    auto* to = grad_x.data_ptr<float>();
    device::parallel_pieces(x.numel(), internal::kActivationGrain,
                            [&](std::int64_t begin, std::int64_t end) {
                              loop(values + begin, from + begin, to + begin, end - begin);
                            });
    return {grad_x, at::Tensor()};
  }
};

}  // namespace

at::Tensor gelu(const at::Tensor& x, GeluKind kind) {
  if (x.device().is_cpu() && x.scalar_type() == at::kFloat && x.is_contiguous())
    return Gelu::apply(x, static_cast<std::int64_t>(kind));
  return at::gelu(x, kind == GeluKind::tanh ? "tanh" : "none");
}

}  // namespace lockstep::nn
