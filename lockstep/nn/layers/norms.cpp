#include <lockstep/nn/layers/norms.h>

#include <limits>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/device/autocast.h>
#include <lockstep/intercept/once_differentiable.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <lockstep/nn/kernels/cuda/on_tensors.h>
#endif

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class NormKind : std::uint8_t { layer, rms };

at::Tensor rms_norm_of_operators(const at::Tensor& x, const NormWeights& norm) {
  const auto type = x.scalar_type();
  const auto wide = type == at::kHalf || type == at::kBFloat16 ? x.to(at::kFloat) : x;
  // Computes the mean as a sum and a division: mean() itself saves all squares for backward
  // (LibTorch 1.13).
  const auto sum = wide.square().sum(-1, /*keepdim=*/true);
  const auto inverse = sum.div_(x.size(-1)).add_(norm.eps).rsqrt_();
  return (wide * inverse).to(type) * norm.weight;
}

at::Tensor layer_norm_of_operators(const at::Tensor& x, const NormWeights& norm) {
  return at::layer_norm(x, norm.weight.sizes(), norm.weight, norm.bias, norm.eps);
}

#ifdef LOCKSTEP_HAVE_CUDA

using MaybeTensor = c10::optional<at::Tensor>;

// Takes x, an update of the result's type or nothing, a weight, and a bias or nothing. Returns the
// norm and, with an update, the sum x + update.
class FusedNorm : public torch::autograd::Function<FusedNorm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const MaybeTensor& update, const at::Tensor& weight,
                               const MaybeTensor& bias, double eps, std::int64_t kind,
                               at::ScalarType type) {
    context->set_materialize_grads(false);
    const at::Tensor input = cuda::dense(x);
    const cuda::NormShape shape = shape_of(input, kind, eps);
    const at::Tensor factors = cuda::dense(weight.to(at::kFloat));
    const at::Tensor shifts = bias ? cuda::dense(bias->to(at::kFloat)) : at::Tensor();
    const at::Tensor added = update ? cuda::dense(*update) : at::Tensor();
    const at::Tensor sum = update ? at::empty_like(input) : at::Tensor();
    const at::Tensor y = at::empty(input.sizes(), input.options().dtype(type));
    const at::Tensor statistics = at::empty({2, shape.rows}, input.options().dtype(at::kFloat));
    float* const numbers = statistics.data_ptr<float>();
    cuda::launch_on(input, [&](CUstream_st* stream) {
      cuda::norm_forward(shape,
                         {.x = input.data_ptr(),
                          .x_type = cuda::element_of(input.scalar_type()),
                          .update = update ? added.data_ptr() : nullptr,
                          .sum = update ? sum.data_ptr() : nullptr,
                          .weight = factors.data_ptr<float>(),
                          .bias = bias ? shifts.data_ptr<float>() : nullptr,
                          .y = y.data_ptr(),
                          .y_type = cuda::element_of(type),
                          .mean = numbers,
                          .inverse = numbers + shape.rows},
                         stream);
    });
    context->save_for_backward({update ? sum : input, weight, statistics});
    context->saved_data["kind"] = kind;
    context->saved_data["bias_type"] =
        static_cast<std::int64_t>(bias ? bias->scalar_type() : weight.scalar_type());
    context->saved_data["has_bias"] = bias.has_value();
    context->saved_data["has_update"] = update.has_value();
    context->saved_data["type"] = static_cast<std::int64_t>(type);
    return update ? variable_list{y, sum} : variable_list{y};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto kind = context->saved_data["kind"].toInt();
    intercept::refuse_double_backward(static_cast<NormKind>(kind) == NormKind::layer ? "layer_norm"
                                                                                     : "rms_norm");
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const auto type_of = [&](const char* name) {
      return static_cast<at::ScalarType>(context->saved_data[name].toInt());
    };
    const auto type = type_of("type");
    const bool has_bias = context->saved_data["has_bias"].toBool();
    const bool has_update = context->saved_data["has_update"].toBool();
    const cuda::NormShape shape = shape_of(x, kind, 0);
    const at::Tensor y_gradient = gradients[0].defined()
                                      ? cuda::dense(gradients[0])
                                      : at::zeros(x.sizes(), x.options().dtype(type));
    at::Tensor sum_gradient;
    if (has_update && gradients[1].defined()) sum_gradient = cuda::dense(gradients[1]);
    const bool update_apart = has_update && type != x.scalar_type();
    const at::Tensor factors = cuda::dense(weight.to(at::kFloat));
    const at::Tensor x_gradient = at::empty_like(x);
    const at::Tensor update_gradient =
        update_apart ? at::empty(x.sizes(), x.options().dtype(type)) : at::Tensor();
    const auto floats = x.options().dtype(at::kFloat);
    // If there are no rows, no kernel writes the gradients, so they begin as zeros.
    const at::Tensor weight_gradient = at::zeros({2, shape.width}, floats);
    const at::Tensor scratch =
        at::empty({static_cast<std::int64_t>(cuda::norm_scratch_floats(shape))}, floats);
    const float* const numbers = saved[2].data_ptr<float>();
    float* const sums = weight_gradient.data_ptr<float>();
    cuda::launch_on(x, [&](CUstream_st* stream) {
      cuda::norm_backward(
          shape,
          {.y_gradient = y_gradient.data_ptr(),
           .y_type = cuda::element_of(type),
           .x = x.data_ptr(),
           .x_type = cuda::element_of(x.scalar_type()),
           .weight = factors.data_ptr<float>(),
           .mean = numbers,
           .inverse = numbers + shape.rows,
           .sum_gradient = sum_gradient.defined() ? sum_gradient.data_ptr() : nullptr,
           .x_gradient = x_gradient.data_ptr(),
           .update_gradient = update_apart ? update_gradient.data_ptr() : nullptr,
           .weight_gradient = sums,
           .bias_gradient = has_bias ? sums + shape.width : nullptr,
           .scratch = scratch.data_ptr<float>()},
          stream);
    });
    variable_list results(7);
    results[0] = x_gradient;
    if (has_update) results[1] = update_apart ? update_gradient : x_gradient;
    results[2] = weight_gradient[0].to(weight.scalar_type());
    if (has_bias) results[3] = weight_gradient[1].to(type_of("bias_type"));
    return results;
  }

 private:
  static cuda::NormShape shape_of(const at::Tensor& x, std::int64_t kind, double eps) {
    const std::int64_t width = x.size(-1);
    LOCKSTEP_CHECK(x.numel() / width <= std::numeric_limits<std::int32_t>::max());
    return {.kind = static_cast<NormKind>(kind) == NormKind::layer ? cuda::NormKind::layer
                                                                   : cuda::NormKind::rms,
            .rows = x.numel() / width,
            .width = width,
            .eps = static_cast<float>(eps)};
  }
};

// The type of the kernel's result; nothing if the kernel cannot take the tensors.
std::optional<at::ScalarType> fused_type(const at::Tensor& x, const NormWeights& norm) {
  const auto of_its_width = [&](const at::Tensor& tensor) {
    return cuda::takes(tensor) && tensor.device() == x.device() && tensor.dim() == 1 &&
           tensor.size(0) == x.size(-1);
  };
  if (!cuda::takes(x) || x.dim() == 0 || !cuda::norm_takes(x.size(-1)) ||
      !of_its_width(norm.weight) || (norm.bias.defined() && !of_its_width(norm.bias)))
    return std::nullopt;
  // Without autocast the result for floats is a float.
  if (x.scalar_type() != at::kFloat) return x.scalar_type();
  return device::Autocast::active(x.device().type()).value_or(at::kFloat);
}

// The sum is in x's type, as LibTorch's would be.
bool takes_update(std::optional<at::ScalarType> type, const at::Tensor& x,
                  const at::Tensor& update) {
  return type && update.device() == x.device() && update.scalar_type() == *type &&
         update.sizes() == x.sizes();
}

variable_list fused_norm(NormKind kind, const at::Tensor& x, const MaybeTensor& update,
                         const NormWeights& norm, at::ScalarType type) {
  return FusedNorm::apply(x, update, norm.weight,
                          norm.bias.defined() ? MaybeTensor(norm.bias) : MaybeTensor(), norm.eps,
                          static_cast<std::int64_t>(kind), type);
}

#endif

at::Tensor norm_of(NormKind kind, const at::Tensor& x, const NormWeights& norm) {
#ifdef LOCKSTEP_HAVE_CUDA
  if (const auto type = fused_type(x, norm)) return fused_norm(kind, x, {}, norm, *type)[0];
#endif
  return kind == NormKind::layer ? layer_norm_of_operators(x, norm)
                                 : rms_norm_of_operators(x, norm);
}

SumAndNorm add_and_norm(NormKind kind, const at::Tensor& x, const at::Tensor& update,
                        const NormWeights& norm) {
#ifdef LOCKSTEP_HAVE_CUDA
  if (const auto type = fused_type(x, norm); takes_update(type, x, update)) {
    const variable_list both = fused_norm(kind, x, update, norm, *type);
    return {.sum = both[1], .norm = both[0]};
  }
#endif
  const at::Tensor sum = x + update;
  return {.sum = sum, .norm = norm_of(kind, sum, norm)};
}

}  // namespace

at::Tensor layer_norm(const at::Tensor& x, const NormWeights& norm) {
  return norm_of(NormKind::layer, x, norm);
}

at::Tensor rms_norm(const at::Tensor& x, const NormWeights& norm) {
  return norm_of(NormKind::rms, x, norm);
}

SumAndNorm add_layer_norm(const at::Tensor& x, const at::Tensor& update, const NormWeights& norm) {
  return add_and_norm(NormKind::layer, x, update, norm);
}

SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& update, const NormWeights& norm) {
  return add_and_norm(NormKind::rms, x, update, norm);
}

NormWeights weights_of(const torch::nn::LayerNormImpl& norm) {
  return {.weight = norm.weight, .bias = norm.bias, .eps = norm.options.eps()};
}

RMSNormImpl::RMSNormImpl(std::int64_t width, double eps)
    : weight(register_parameter("weight", at::ones({width}))), eps_(eps) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) { return rms_norm(x, weights()); }

}  // namespace lockstep::nn
