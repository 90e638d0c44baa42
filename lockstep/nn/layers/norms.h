// Layer norm and RMS norm, alone and after the sum of a residual connection.
//
// On CUDA a kernel of our own reads its input once and makes the sum on the way. Its result is in
// x's type, or in autocast's type if x is float under autocast; it has no second derivative.
// Elsewhere, and for widths that the kernel does not take, these are LibTorch's operators.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

namespace lockstep::nn {

// The weights of a norm.
struct NormWeights {
  at::Tensor weight;     // [width]
  at::Tensor bias = {};  // only of a layer norm
  double eps = 0;
};

// (x - mean) / sqrt(variance + eps) · weight + bias, over the last dim.
at::Tensor layer_norm(const at::Tensor& x, const NormWeights& norm);
// x / sqrt(mean of squares + eps) · weight, over the last dim. 16-bit inputs are normalised in
// float.
at::Tensor rms_norm(const at::Tensor& x, const NormWeights& norm);

struct SumAndNorm {
  at::Tensor sum;   // x + update, in x's type
  at::Tensor norm;  // the norm of the sum
};
SumAndNorm add_layer_norm(const at::Tensor& x, const at::Tensor& update, const NormWeights& norm);
SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& update, const NormWeights& norm);

// The weights of a module.
NormWeights weights_of(const torch::nn::LayerNormImpl& norm);

// Root-mean-square normalisation (Zhang and Sennrich, 2019): x / sqrt(mean(x²) + eps) · weight,
// over the last dim. 16-bit inputs are normalised in float. The weight begins as ones.
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
