// Which pieces of a tensor, in files or in memory, fill a part of it: what loads in any layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/mesh/placement/read_plan.h>

namespace lockstep::checkpoint {

// A tensor as it was saved.
struct SavedTensor {
  const std::string& name;
  const std::vector<std::int64_t>& shape;
};

// The holders are the pieces, by their places; the reads are in the order of holders, so that what
// lies together is read once. `reader` is mesh::ReadOptions'. Pieces may have been cut as another
// shape with as many elements, and hold the same elements.
//
// UsageError where pieces and `wanted` are cut along dims of different shapes, or nobody holds some
// of what is wanted.
std::vector<mesh::Read> plan_piece_reads(const SavedTensor& tensor,
                                         std::vector<mesh::Placement> pieces,
                                         mesh::Placement wanted, int reader);

}  // namespace lockstep::checkpoint
