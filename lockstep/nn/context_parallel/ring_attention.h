// Ring attention: every rank keeps its queries, and the blocks of keys and values pass from rank to
// rank while attention computes on the block at hand. The results of the blocks are merged by the
// log-sum-exp of their scores, in float (float64 for float64).
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/nn/context_parallel/sequence_split.h>
#include <lockstep/nn/layers/attention_blocks.h>

namespace lockstep::nn::internal {

// The type in which results and gradients are added up: float, or float64 for float64.
at::ScalarType sum_type(at::ScalarType type);

// Attention over a first part of the keys, on any device and in any floating type. The shapes are
// those of attention.h and have been checked there. The result is in sum_type, with the memory
// layout of attention.h's result.
AttentionResult attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionTerms& terms);

// Attention over a further part of the keys: `so_far` becomes the result over all parts until now.
// Its tensors may be parts of larger ones, for example if only some queries see these keys.
void attend_more(const AttentionResult& so_far, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v, const AttentionTerms& terms);

// Adds one part's gradients, for the output's gradient `grad`, to those in `gradients` (in
// sum_type, with a contiguous last dimension). `result` is the result over all parts.
void add_gradients(const AttentionGradients& gradients, const at::Tensor& grad, const at::Tensor& q,
                   const at::Tensor& k, const at::Tensor& v, const AttentionResult& result,
                   const AttentionTerms& terms);

struct RingTerms {
  AttentionTerms attention;
  SplitKind split = SplitKind::zigzag;
  std::int32_t subject = -1;  // subject of the group's calls (comm::CallOptions)
};

// q [batch, heads, local length, head_dim], k and v [batch, kv_heads, local length, head_dim], the
// same shapes on every rank. Sums in float, or float64 for that.
AttentionResult ring_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             comm::Communicator& group, const RingTerms& terms);

// Keys and values travel around the ring again. Their gradients follow one step behind, each rank
// adding its share, until they reach their owner.
AttentionGradients ring_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const AttentionResult& result,
                                 comm::Communicator& group, const RingTerms& terms);

}  // namespace lockstep::nn::internal
