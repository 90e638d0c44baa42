// The state of an optimizer that steps on parts, whole.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/data_parallel/model_state.h>
#include <lockstep/parallel/shard/flat_unit.h>

namespace lockstep::shard {

using data_parallel::StateDictOptions;

// A parameter's parts, or those of something that is cut as it is, as one tensor of its shape on
// every rank of the group that holds them.
at::Tensor gather_pieces(const at::Tensor& mine, const FlatUnit& unit, std::size_t member,
                         comm::Communicator& group);

// Optimizer::state() for whole parameters. One tensor is gathered at a time. Every rank
// of the group that holds the parts calls it; `is_first` says which of all ranks is rank 0.
std::vector<NamedTensor> gather_state(const std::vector<NamedTensor>& parts,
                                      std::span<const std::unique_ptr<FlatUnit>> units,
                                      comm::Communicator& group, const StateDictOptions& options,
                                      bool is_first);

// The same tensors as parts of the whole ones.
std::vector<mesh::HeldTensor> held_state(const std::vector<NamedTensor>& parts,
                                         std::span<const std::unique_ptr<FlatUnit>> units);

// The reverse of gather_state: from the first of all ranks, into each rank's parts; other ranks'
// lists are not looked at. `rank` is this one's among those that hold the parts. UsageError on all
// ranks where something is missing or of another shape.
void scatter_state(optim::Optimizer& optimizer, const std::vector<NamedTensor>& whole,
                   std::span<const std::unique_ptr<FlatUnit>> units, comm::Communicator& all,
                   int rank);

}  // namespace lockstep::shard
