// Scaled dot-product attention.
#pragma once

#include <cmath>
#include <limits>
#include <optional>

#include <ATen/ATen.h>

namespace lockstep::nn {

struct AttentionOptions {
  bool causal = true;
  std::optional<double> scale;  // 1/sqrt(head_dim) where not given
};

// q [batch, heads, length, head_dim], k and v [batch, kv_heads, keys, head_dim] give
// [batch, heads, length, head_dim], which lies in memory as [batch, length, heads, head_dim].
// Causal: the last query sees all keys.
inline at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionOptions& options = {}) {
  const auto group = q.size(1) / k.size(1);
  const auto keys = group == 1 ? k : k.repeat_interleave(group, 1);
  const auto values = group == 1 ? v : v.repeat_interleave(group, 1);
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  auto scores = at::matmul(q, keys.transpose(2, 3)) * scale;
  if (options.causal) {
    const auto seen =
        at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).tril(k.size(2) - q.size(2));
    scores = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  }
  return at::matmul(scores.softmax(-1), values).transpose(1, 2).contiguous().transpose(1, 2);
}

}  // namespace lockstep::nn
