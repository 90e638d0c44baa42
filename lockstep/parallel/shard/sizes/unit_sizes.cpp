#include <lockstep/parallel/shard/sizes/unit_sizes.h>

#include <algorithm>
#include <numeric>

namespace lockstep::shard {

namespace {

// The units that stay on every rank have at most this share of the elements of a rank's parts.
constexpr double kResidentShare = 0.02;

}  // namespace

std::int64_t part_size(std::int64_t num_elements, int num_ranks) {
  const std::int64_t even = (num_elements + num_ranks - 1) / num_ranks;
  return (even + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

std::vector<bool> small_units(std::span<const std::int64_t> unit_sizes, int num_ranks) {
  const std::int64_t total = std::accumulate(unit_sizes.begin(), unit_sizes.end(), std::int64_t{0});
  auto allowance = static_cast<std::int64_t>(static_cast<double>(total) * kResidentShare /
                                             static_cast<double>(num_ranks));
  std::vector<std::size_t> by_size(unit_sizes.size());
  std::iota(by_size.begin(), by_size.end(), std::size_t{0});
  std::ranges::stable_sort(by_size, {}, [&](std::size_t i) { return unit_sizes[i]; });
  std::vector<bool> small(unit_sizes.size());
  for (const std::size_t i : by_size) {
    allowance -= unit_sizes[i];
    if (allowance < 0) break;
    small[i] = true;
  }
  return small;
}

std::vector<bool> choose_residents(std::span<const std::int64_t> unit_sizes, int num_ranks) {
  return num_ranks == 1 ? std::vector<bool>(unit_sizes.size(), true)
                        : small_units(unit_sizes, num_ranks);
}

std::vector<std::size_t> group_left_over(std::span<const std::int64_t> parameter_sizes,
                                         std::int64_t largest_unit) {
  if (largest_unit == 0)
    largest_unit =
        std::accumulate(parameter_sizes.begin(), parameter_sizes.end(), std::int64_t{0}) / 8;
  std::vector<std::size_t> groups;
  std::int64_t size = 0;
  for (const std::int64_t count : parameter_sizes) {
    const bool full = size + count > largest_unit;
    if (full) size = 0;
    size += count;
    groups.push_back(groups.empty() ? 0 : groups.back() + (full ? 1 : 0));
  }
  return groups;
}

}  // namespace lockstep::shard
