// Ring attention: every rank keeps its queries, and the blocks of keys and values pass from rank to
// rank while attention computes on those that are there.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/nn/attention_blocks.h>
#include <lockstep/nn/sequence_split.h>

namespace lockstep::nn::internal {

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
