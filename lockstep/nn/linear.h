// torch::nn's Linear and Embedding, but for their first weights: those of a large model are not to
// be drawn twice, nor from the generator that the user's program draws from.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace lockstep::nn {

enum class Bias { none, added };

// x · weightᵀ + bias. The weights are uninitialised memory.
class LinearImpl : public torch::nn::Module {
 public:
  LinearImpl(std::int64_t in, std::int64_t out, Bias bias);

  at::Tensor forward(const at::Tensor& x);  // [..., in] to [..., out]

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out]; undefined where there is none
};

TORCH_MODULE(Linear);

// Row t of the weight for token t. The weight is uninitialised memory.
class EmbeddingImpl : public torch::nn::Module {
 public:
  EmbeddingImpl(std::int64_t rows, std::int64_t width);

  at::Tensor forward(const at::Tensor& tokens);  // [...] of int64 to [..., width]

  at::Tensor weight;  // [rows, width]
};

TORCH_MODULE(Embedding);

}  // namespace lockstep::nn
