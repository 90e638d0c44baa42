// Which of the memories that wait is taken again, and which are freed to make room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::shard {

// Memories of any sizes that wait to be taken again; those who plan have the sizes alone.
// `SizeOf{}(memory)` is its bytes.
template <typename Memory, typename SizeOf>
class IdleBuffers {
 public:
  // The smallest that is large enough, unless most of it would lie idle.
  std::optional<Memory> take(std::int64_t bytes) {
    const auto found =
        std::ranges::find_if(waiting_, [&](const Memory& one) { return SizeOf{}(one) >= bytes; });
    if (found == waiting_.end() || SizeOf{}(*found) / 4 * 3 > bytes) return {};
    std::optional<Memory> taken(std::move(*found));
    waiting_.erase(found);
    return taken;
  }

  void add(Memory memory) {
    const std::int64_t bytes = SizeOf{}(memory);
    const auto place =
        std::ranges::find_if(waiting_, [&](const Memory& one) { return SizeOf{}(one) >= bytes; });
    waiting_.insert(place, std::move(memory));
  }

  // Frees the largest until `bytes` less are held, or none is left. Returns how many were freed.
  std::int64_t free(std::int64_t bytes) {
    std::int64_t freed = 0;
    while (freed < bytes && !waiting_.empty()) {
      freed += SizeOf{}(waiting_.back());
      waiting_.pop_back();
    }
    return freed;
  }

 private:
  std::vector<Memory> waiting_;  // smallest first
};

}  // namespace lockstep::shard
