// The keys and values of earlier tokens, so that one more token costs one token's work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::models {

// The keys and values of every layer for the tokens so far. A model's extend() fills it; start a
// new text with a new cache.
//
// Ownership: holds memory for `capacity` tokens from the first append on. Threading: one thread at
// a time. Failure: UsageError if more tokens are added than fit. After an exception in the middle
// of extend() its layers differ in length, and it cannot be used any more.
class KeyValueCache {
 public:
  explicit KeyValueCache(std::int64_t capacity) : capacity_(capacity) {}

  std::int64_t capacity() const { return capacity_; }
  // The tokens that the first layer has seen. Before a forward pass all layers have seen the same.
  std::int64_t length() const { return layers_.empty() ? 0 : layers_.front().length; }

  struct KeysAndValues {
    at::Tensor keys;    // [batch, kv_heads, length, head_dim]
    at::Tensor values;  // the same shape as keys
  };

  // Adds the keys and values of new tokens to a layer, and returns all that the layer has, as views
  // of the cache.
  KeysAndValues append(std::size_t layer, const KeysAndValues& added);

 private:
  struct Layer {
    KeysAndValues held;  // [batch, kv_heads, capacity, head_dim]
    std::int64_t length = 0;
  };

  std::int64_t capacity_;
  std::vector<Layer> layers_;
};

}  // namespace lockstep::models
