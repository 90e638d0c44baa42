// Attention in blocks of rows, float32 on a CPU. The shapes are those of attention.h, checked
// there.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn::internal {

struct AttentionTerms {
  bool causal = true;
  double scale = 1.0;
};

struct AttentionResult {
  at::Tensor output;       // [batch, heads, length, head_dim]
  at::Tensor log_sum_exp;  // [batch, heads, length]: of each query's scores, what backward needs
};

struct AttentionGradients {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
};

AttentionResult attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionTerms& terms);

AttentionGradients attention_backward(const at::Tensor& grad, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v,
                                      const AttentionResult& result, const AttentionTerms& terms);

}  // namespace lockstep::nn::internal
