// Ring attention: every rank keeps its queries, and the blocks of keys and values pass from rank to
// rank while attention computes on those that are there. What each part of the keys gives is
// merged, in float (float64 for that), by the log-sum-exp of its scores.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/nn/context_parallel/sequence_split.h>
#include <lockstep/nn/layers/attention_blocks.h>

namespace lockstep::nn::internal {

// The type that results and gradients are added up in: float, or float64 for float64.
at::ScalarType sum_type(at::ScalarType type);

// Attention over a first part of the keys, on any device and in any floating type; shapes are those
// of attention.h, checked there. The result is in sum_type, and lies in memory by position as that
// of attention.h.
AttentionResult attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionTerms& terms);

// Attention over a further part: `so_far` becomes the result over all parts until now. Its tensors
// may be parts of larger ones, as where not all queries see these keys.
void attend_more(const AttentionResult& so_far, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v, const AttentionTerms& terms);

// Adds one part's gradients, of `grad` for the output, to those in `gradients` (in sum_type, last
// dimension contiguous). `result` is that over all parts.
void add_gradients(const AttentionGradients& gradients, const at::Tensor& grad, const at::Tensor& q,
                   const at::Tensor& k, const at::Tensor& v, const AttentionResult& result,
                   const AttentionTerms& terms);

struct RingTerms {
  AttentionTerms attention;
  SplitKind split = SplitKind::zigzag;
  std::int32_t subject = -1;  // of the group's calls (comm::CallOptions)
};

// q [batch, heads, local length, head_dim], k and v [batch, kv_heads, local length, head_dim], the
// same shapes on every rank. Sums in float, or float64 for that.
AttentionResult ring_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             comm::Communicator& group, const RingTerms& terms);

// Keys and values travel again, and what each rank adds to their gradients one step behind them,
// until it is with their owner.
AttentionGradients ring_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const AttentionResult& result,
                                 comm::Communicator& group, const RingTerms& terms);

}  // namespace lockstep::nn::internal
