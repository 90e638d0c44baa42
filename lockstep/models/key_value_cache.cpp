#include <lockstep/models/key_value_cache.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::models {

KeyValueCache::KeysAndValues KeyValueCache::append(std::size_t layer, const KeysAndValues& added) {
  LOCKSTEP_CHECK(layer <= layers_.size(), "layer {} of {}", layer, layers_.size());
  const auto& keys = added.keys;
  if (layer == layers_.size()) {
    const auto room = [&] {
      return at::empty({keys.size(0), keys.size(1), capacity_, keys.size(3)}, keys.options());
    };
    layers_.push_back({{room(), room()}});
  }
  auto& [held, length] = layers_[layer];
  const auto count = keys.size(2);
  if (length + count > capacity_)
    throw UsageError("{} more tokens do not fit into a cache of {} that holds {}", count, capacity_,
                     length);
  held.keys.narrow(2, length, count).copy_(keys);
  held.values.narrow(2, length, count).copy_(added.values);
  length += count;
  return {held.keys.narrow(2, 0, length), held.values.narrow(2, 0, length)};
}

}  // namespace lockstep::models
