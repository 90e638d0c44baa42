// Attention over the keys part by part, on any device and in any floating type: what each part
// gives is merged, in float (float64 for that), by the log-sum-exp of its scores. The shapes are
// those of attention.h, checked there.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/nn/attention_blocks.h>

namespace lockstep::nn::internal {

// What results and gradients are added up in: float, or float64 for float64.
at::ScalarType sum_type(at::ScalarType type);

// Over a first part. The result is in sum_type, and lies in memory by position as that of
// attention.h.
AttentionResult attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionTerms& terms);

// Over a further part: `so_far` becomes the result over all parts until now. Its tensors may be
// parts of larger ones, as where not all queries see these keys.
void attend_more(const AttentionResult& so_far, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v, const AttentionTerms& terms);

// Adds one part's gradients, of `grad` for the output, to those in `gradients` (in sum_type, last
// dimension contiguous). `result` is that over all parts.
void add_gradients(const AttentionGradients& gradients, const at::Tensor& grad, const at::Tensor& q,
                   const at::Tensor& k, const at::Tensor& v, const AttentionResult& result,
                   const AttentionTerms& terms);

}  // namespace lockstep::nn::internal
