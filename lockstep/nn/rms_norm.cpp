#include <lockstep/nn/rms_norm.h>

#include <ATen/ATen.h>

namespace lockstep::nn {

RMSNormImpl::RMSNormImpl(std::int64_t width, double eps)
    : weight(register_parameter("weight", at::ones({width}))), eps_(eps) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) { return rms_norm(x, weights()); }

}  // namespace lockstep::nn
