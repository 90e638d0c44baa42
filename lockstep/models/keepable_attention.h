// Attention whose result recomputation may keep.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/models/key_value_cache.h>
#include <lockstep/models/model_axes.h>
#include <lockstep/nn/layers/attention.h>
#include <lockstep/recompute/keep_results.h>

namespace lockstep::models {

// nn::attention(), which is no operator of LibTorch's, as one of the kinds that KeepResults knows.
// Over all of a sequence, of which ranks of a context axis have a part each.
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
