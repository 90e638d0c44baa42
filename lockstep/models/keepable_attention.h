// Attention whose result recomputation can keep.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/models/key_value_cache.h>
#include <lockstep/models/model_axes.h>
#include <lockstep/nn/layers/attention.h>
#include <lockstep/recompute/keep_results.h>

namespace lockstep::models {

// nn::attention(), made known to KeepResults, which otherwise sees only LibTorch's operators. If
// ranks of a context axis have a part of each sequence, attention is over the whole sequence.
inline at::Tensor keepable_attention(const at::Tensor& q, const KeyValueCache::KeysAndValues& kv,
                                     const ModelAxes& axes) {
  return activations::operation(
      OperationKind::attention,
      [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
        if (axes.context == nullptr) return nn::attention(q, k, v);
        return nn::context_parallel_attention(
            q, k, v, axes.context,
            {.algorithm = axes.context_algorithm, .split = axes.context_split});
      },
      q, kv.keys, kv.values);
}

}  // namespace lockstep::models
