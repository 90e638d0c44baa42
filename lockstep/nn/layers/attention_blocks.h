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

// [batch, heads, length, head_dim] as `like`, in the memory of [batch, length, heads, head_dim]. No
// view in autograd's eyes: a result that is one and saved for backward stays when it is to be
// recomputed.
at::Tensor empty_by_position(const at::Tensor& like, at::ScalarType type);

AttentionResult attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionTerms& terms);

// The same over more keys: `so_far`, the result over others, becomes the result over all of them.
// Its tensors may be parts of larger ones.
void attention_forward_more(const AttentionResult& so_far, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const AttentionTerms& terms);

AttentionGradients attention_backward(const at::Tensor& grad, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v,
                                      const AttentionResult& result, const AttentionTerms& terms);

// Adds to what the gradients hold, whose last dimension is contiguous. `result` is that over all
// keys, of which k and v may be a part.
void attention_backward_more(const AttentionGradients& gradients, const at::Tensor& grad,
                             const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionResult& result, const AttentionTerms& terms);

}  // namespace lockstep::nn::internal
