// Tensors in which every element identifies itself, held by ranks in several ways.
#pragma once

#include <string>
#include <vector>

#include <lockstep/recovery/checkpointer.h>
#include <tests/ranks/cells.h>

namespace lockstep::peer_copies {

enum class Values { of_step, none };

// The tensors of a rank in a world of this size: one that all ranks have, some that are cut among
// them, along dims, in flat order and as another shape, and one of its own. Filled with the values
// of a step, or with zeros.
std::vector<mesh::HeldTensor> parts_of(int rank, int num_ranks, std::int64_t step, Values values,
                                       std::int64_t large_elements = 0);

CheckpointContents contents_of(int rank, int num_ranks, std::int64_t step,
                               std::int64_t large_elements = 0);

// Expects the values of the step.
void expect_values(ranks::Cells& cells, const std::vector<mesh::HeldTensor>& tensors,
                   std::int64_t step);
// Expects that nothing was written to them.
void expect_untouched(ranks::Cells& cells, const std::vector<mesh::HeldTensor>& tensors);

}  // namespace lockstep::peer_copies
