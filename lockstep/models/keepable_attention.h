// Attention whose result recomputation may keep.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/models/key_value_cache.h>
#include <lockstep/nn/attention.h>
#include <lockstep/recompute/keep_results.h>

namespace lockstep::models {

// nn::attention(), which is no operator of LibTorch's, as one of the kinds that KeepResults knows.
inline at::Tensor keepable_attention(const at::Tensor& q, const KeyValueCache::KeysAndValues& kv) {
  return activations::operation(
      OperationKind::attention,
      [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
        return nn::attention(q, k, v);
      },
      q, kv.keys, kv.values);
}

}  // namespace lockstep::models
