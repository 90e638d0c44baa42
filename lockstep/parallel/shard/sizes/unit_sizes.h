// How large units are, and which memory is used again. The functions that cut a model are the ones
// that the planner asks, so these are plain numbers: elements of units, bytes of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace lockstep::shard {

// A part's size is a multiple of this, so that parts begin where vectors and cache lines do.
inline constexpr std::int64_t kPartAlignment = 16;

// Units whose gradients are on their way while the next one's are collected.
inline constexpr std::size_t kGradientsInFlight = 2;
// Together with the next one's, this many buffers of the largest unit's size are kept between uses.
inline constexpr std::int64_t kGradientBuffers = 3;

// The number of elements that each of `num_ranks` holds of a unit. All parts together include
// padding.
std::int64_t part_size(std::int64_t num_elements, int num_ranks);

// Marks the units that are too small to be worth a message each time they are used: norms and
// biases outside of the blocks. Together they cost next to nothing.
std::vector<bool> small_units(std::span<const std::int64_t> unit_sizes, int num_ranks);

// Marks the units that stay on every rank: the small ones, or all of them on a single rank.
std::vector<bool> choose_residents(std::span<const std::int64_t> unit_sizes, int num_ranks);

// Parameters that are in no module that makes a unit are put together, in the model's order, up to
// the size of the largest unit, or an eighth of the model where there is none (`largest_unit` is
// 0). For each parameter, the number of its group.
std::vector<std::size_t> group_left_over(std::span<const std::int64_t> parameter_sizes,
                                         std::int64_t largest_unit);

// Buffers of any sizes that wait to be used again. Decides which one is taken, and which are freed
// to make room. A planner has sizes in place of memory; `SizeOf{}(memory)` is the bytes.
template <typename Memory, typename SizeOf>
class IdleBuffers {
 public:
  // Takes the smallest buffer that is large enough, unless most of it would lie idle.
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
