// How large units are and what is done with them because of it. Plain numbers, in elements: what
// the planner says of a model is worked out by the functions that cut it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::shard {

// What a part's size is a multiple of, so that parts begin where vectors and cache lines do.
inline constexpr std::int64_t kPartAlignment = 16;

// Units whose gradients are on their way while the next one's are collected.
inline constexpr std::size_t kGradientsInFlight = 2;
// And with that one, so many memories of the largest unit's size are kept between uses.
inline constexpr std::int64_t kGradientBuffers = 3;

// What each of so many ranks holds of a unit; all of them together hold padding, too.
std::int64_t part_size(std::int64_t num_elements, int num_ranks);

// Which units are too small to be worth a message each time they are used: norms and biases outside
// of the blocks. Together they cost next to nothing.
std::vector<bool> small_units(std::span<const std::int64_t> unit_sizes, int num_ranks);

// Which units stay on every rank: those, and on one rank all of them.
std::vector<bool> choose_residents(std::span<const std::int64_t> unit_sizes, int num_ranks);

// Parameters that are in no module that makes a unit are put together, in the model's order, up to
// the size of the largest unit, or an eighth of the model where there is none (`largest_unit` is
// 0). For each parameter, the number of its group.
std::vector<std::size_t> group_left_over(std::span<const std::int64_t> parameter_sizes,
                                         std::int64_t largest_unit);

}  // namespace lockstep::shard
