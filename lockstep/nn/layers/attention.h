// Scaled dot-product attention.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

struct AttentionOptions {
  bool causal = true;  // the last query sees all keys, the one before it all but the last, …
  std::optional<double> scale;  // 1/sqrt(head_dim) if not given
};

// Computes softmax(scale·q·kᵀ)·v of q [batch, heads, length, head_dim], k and v [batch, kv_heads,
// keys, head_dim]. heads is a multiple of kv_heads: each head of k and v serves heads/kv_heads
// consecutive heads of q. Returns [batch, heads, length, head_dim] in the memory layout of [batch,
// length, heads, head_dim], so that transpose(1, 2).reshape({batch, length, -1}) costs nothing.
//
// float32 on a CPU goes through blocks of rows, so the matrix of scores is never in memory as a
// whole, neither in forward nor in backward; the inputs may be views (of one projection, say) whose
// last dimension is contiguous. Everything else goes through LibTorch's own attention.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options = {});

namespace internal {
// Throws UsageError if the shapes, types or devices do not fit an attention.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal);
}  // namespace internal

}  // namespace lockstep::nn
