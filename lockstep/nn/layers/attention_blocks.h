// Attention in blocks of rows, for float32 on a CPU. The shapes are those of attention.h and have
// been checked there.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn::internal {

struct AttentionTerms {
  bool causal = true;
  double scale = 1.0;
};

struct AttentionResult {
  at::Tensor output;  // [batch, heads, length, head_dim]
  // [batch, heads, length]: log-sum-exp of each query's scores, for backward
  at::Tensor log_sum_exp;
};

struct AttentionGradients {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
};

// An empty [batch, heads, length, head_dim] like `like`, in the memory layout of [batch, length,
// heads, head_dim]. Autograd does not see it as a view: recomputation cannot free a saved result
// that is a view.
at::Tensor empty_by_position(const at::Tensor& like, at::ScalarType type);

AttentionResult attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionTerms& terms);

// Attention over more keys: `so_far`, the result over other keys, becomes the result over all of
// them. Its tensors may be parts of larger ones.
void attention_forward_more(const AttentionResult& so_far, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const AttentionTerms& terms);

AttentionGradients attention_backward(const at::Tensor& grad, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v,
                                      const AttentionResult& result, const AttentionTerms& terms);

// Adds to the given gradients, whose last dimension is contiguous. `result` is the result over all
// keys, of which k and v may be a part.
void attention_backward_more(const AttentionGradients& gradients, const at::Tensor& grad,
                             const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionResult& result, const AttentionTerms& terms);

}  // namespace lockstep::nn::internal
