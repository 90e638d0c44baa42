// Tensors whose every element says which one it is, held by ranks in several ways.
#pragma once

#include <string>
#include <vector>

#include <lockstep/recovery/checkpointer.h>
#include <tests/ranks/cells.h>

namespace lockstep::peer_copies {

enum class Values { of_step, none };

// What a rank has in a world of so many: one tensor that all have, some that are cut among them,
// along dims, in flat order and as another shape, and one of its own. Filled with what they are at
// a step, or with zeros.
std::vector<mesh::HeldTensor> parts_of(int rank, int num_ranks, std::int64_t step, Values values,
                                       std::int64_t large_elements = 0);

CheckpointContents contents_of(int rank, int num_ranks, std::int64_t step,
                               std::int64_t large_elements = 0);

// That they are what they were at the step.
void expect_values(ranks::Cells& cells, const std::vector<mesh::HeldTensor>& tensors,
                   std::int64_t step);
// That nothing was written to them.
void expect_untouched(ranks::Cells& cells, const std::vector<mesh::HeldTensor>& tensors);

}  // namespace lockstep::peer_copies
