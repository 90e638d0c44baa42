// What attention remembers of the tokens before, so that one more token costs one token's work.
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
// a time. Failure: UsageError where more tokens are added than fit. After an exception in the
// middle of extend() its layers differ in length: throw it away.
class KeyValueCache {
 public:
  explicit KeyValueCache(std::int64_t capacity) : capacity_(capacity) {}

  std::int64_t capacity() const { return capacity_; }
  // Tokens that the first layer has seen: before a forward, those that all have.
  std::int64_t length() const { return layers_.empty() ? 0 : layers_.front().length; }

  struct KeysAndValues {
    at::Tensor keys;    // [batch, kv_heads, length, head_dim]
    at::Tensor values;  // the same
  };

  // Adds those of new tokens to a layer, and gives back all it has: views of the cache.
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
