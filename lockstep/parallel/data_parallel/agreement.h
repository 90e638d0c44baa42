// Do all ranks hold the same model?
#pragma once

#include <optional>
#include <span>
#include <string>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::data_parallel {

// Every rank of the group calls it. Where names, shapes, dtypes or what is trained differ, every
// rank gets the same UsageError, which names the first tensor that differs and the ranks.
void check_same_tensors(std::span<const NamedTensor> tensors, comm::Communicator& group);

// Every rank's tensors become those of rank 0. Those that lie elsewhere than on `device`, where the
// group's messages live, go through a copy there; without one, each goes from where it lies, which
// must be a device that the group takes.
void broadcast_from_first(std::span<const NamedTensor> tensors, comm::Communicator& group,
                          std::optional<c10::Device> device = {});

// Every rank says what is wrong on it, nothing where all is well. Where something is on any, every
// rank gets the same UsageError, with the first fault there is.
void refuse_together(const std::string& fault, comm::Communicator& group);

}  // namespace lockstep::data_parallel
