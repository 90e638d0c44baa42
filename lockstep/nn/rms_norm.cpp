#include <lockstep/nn/rms_norm.h>

#include <ATen/ATen.h>

namespace lockstep::nn {

RMSNormImpl::RMSNormImpl(std::int64_t width, double eps)
    : weight(register_parameter("weight", at::ones({width}))), eps_(eps) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  const auto type = x.scalar_type();
  const auto wide = type == at::kHalf || type == at::kBFloat16 ? x.to(at::kFloat) : x;
  // Their mean: mean() itself keeps all of them for backward (LibTorch 1.13).
  const auto sum = wide.square().sum(-1, /*keepdim=*/true);
  const auto inverse = sum.div_(x.size(-1)).add_(eps_).rsqrt_();
  return (wide * inverse).to(type) * weight;
}

}  // namespace lockstep::nn
