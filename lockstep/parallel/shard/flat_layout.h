// Where parameters lie in the memory of their unit, and how that is cut among ranks. Plain numbers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep::shard {

// Parameters one after the other in row-major order, then as much padding as makes all ranks' parts
// equal and begin where vectors and cache lines do. A value; offsets and sizes are in elements.
class FlatLayout {
 public:
  FlatLayout(std::span<const std::int64_t> sizes, int num_ranks);

  std::size_t num_members() const { return ranges_.size(); }
  // A parameter's place in the unit.
  mesh::Interval range(std::size_t member) const { return ranges_[member]; }

  std::int64_t num_elements() const { return ranges_.empty() ? 0 : ranges_.back().end; }
  std::int64_t num_padded() const { return part_ * num_ranks_; }

  // What a rank holds of the unit.
  std::int64_t part_size() const { return part_; }
  mesh::Interval part(int rank) const { return {rank * part_, (rank + 1) * part_}; }

  // What a rank holds of a parameter, in the parameter's own order; may be empty.
  mesh::Interval piece(std::size_t member, int rank) const;
  // Where in the rank's part that begins.
  std::int64_t piece_offset(std::size_t member, int rank) const;

 private:
  int num_ranks_;
  std::int64_t part_ = 0;
  std::vector<mesh::Interval> ranges_;
};

}  // namespace lockstep::shard
