// The engines that this build has.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/device_lane.h>
#include <lockstep/comm/engines/engine_options.h>

namespace lockstep::comm::engines {

// Those of "gloo", "mpi" and "nccl" that were there when Lockstep was built.
std::vector<std::string> available_engines();
bool has_engine(const std::string& name);

// What would have to be installed for an engine that this build lacks; nothing where it has the
// engine, or does not know it.
std::optional<std::string> needed_for(const std::string& name);

// A communicator over gloo or mpi. Every rank of the group calls it; returns once all are
// connected. UsageError for an unknown engine, or for one that this build lacks, with what to
// install; CommError that names the ranks that did not come by the timeout.
std::shared_ptr<Communicator> make_engine(const std::string& name, const GroupInfo& group,
                                          const EngineOptions& options);

// NCCL, for the tensors on GPUs of a group of our own transports. UsageError where this build lacks
// it.
MakeLane nccl_lanes(c10::Device device);

// Connects NCCL on the current device, alone, and adds something up; throws what is wrong with it.
void try_nccl(const Deadline& deadline);

// A GPU's host and its place there, by which NCCL tells it apart from every other GPU of the job.
// The text is empty where the device is no GPU, or where NCCL cannot be used.
std::string gpu_identity(c10::Device device);

}  // namespace lockstep::comm::engines
