// Root-mean-square normalisation (Zhang and Sennrich, 2019).
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/nn/norms.h>

namespace lockstep::nn {

// x / sqrt(mean(x²) + eps) · weight, over the last dim. 16-bit inputs are normalised in float.
// The weight begins as ones.
class RMSNormImpl : public torch::nn::Module {
 public:
  RMSNormImpl(std::int64_t width, double eps);

  at::Tensor forward(const at::Tensor& x);  // [..., width], as the result

  NormWeights weights() const { return {.weight = weight, .eps = eps_}; }

  at::Tensor weight;  // [width]

 private:
  double eps_;
};

TORCH_MODULE(RMSNorm);

}  // namespace lockstep::nn
