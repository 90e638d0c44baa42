#include <lockstep/parallel/shard/flat_layout.h>

#include <algorithm>

#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::shard {

FlatLayout::FlatLayout(std::span<const std::int64_t> sizes, int num_ranks) : num_ranks_(num_ranks) {
  std::int64_t next = 0;
  for (const std::int64_t size : sizes) {
    ranges_.push_back({next, next + size});
    next += size;
  }
  part_ = shard::part_size(next, num_ranks);
}

mesh::Interval FlatLayout::piece(std::size_t member, int rank) const {
  const mesh::Interval whole = ranges_[member];
  const mesh::Interval mine = part(rank);
  const std::int64_t begin = std::clamp(mine.begin, whole.begin, whole.end);
  const std::int64_t end = std::clamp(mine.end, whole.begin, whole.end);
  return {begin - whole.begin, end - whole.begin};
}

std::int64_t FlatLayout::piece_offset(std::size_t member, int rank) const {
  return std::clamp(ranges_[member].begin - part(rank).begin, std::int64_t{0}, part_);
}

}  // namespace lockstep::shard
