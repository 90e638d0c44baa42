// Scaled dot-product attention.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

struct AttentionOptions {
  bool causal = true;  // the last query sees all keys, the one before it all but the last, …
  std::optional<double> scale;  // 1/sqrt(head_dim) where not given
};

// softmax(scale·q·kᵀ)·v of q [batch, heads, length, head_dim], k and v [batch, kv_heads, keys,
// head_dim], where heads is a multiple of kv_heads (each of theirs serves as many of ours, in
// order). Gives [batch, heads, length, head_dim] that lies in memory as [batch, length, heads,
// head_dim], so that transpose(1, 2).reshape({batch, length, -1}) costs nothing.
//
// float32 on a CPU goes through blocks of rows, and the matrix of scores is never there as a whole,
// in forward or backward; the inputs may be views (of one projection, say) whose last dimension is
// contiguous. Everything else goes through LibTorch's own attention.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options = {});

namespace internal {
// UsageError where the shapes, types or devices are not those of an attention.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal);
}  // namespace internal

}  // namespace lockstep::nn
