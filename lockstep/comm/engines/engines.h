// The engines that this build has.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/engines/engine_options.h>

namespace lockstep::comm::engines {

// Those of "gloo", "mpi" and "nccl" that were there when Lockstep was built.
std::vector<std::string> available_engines();

// What would have to be installed for an engine that this build lacks; nothing where it has the
// engine, or does not know it.
std::optional<std::string> needed_for(const std::string& name);

// A communicator over the engine of that name. Every rank of the group calls it; returns once all
// are connected. UsageError for an unknown engine, or for one that this build lacks, with what to
// install; CommError that names the ranks that did not come by the timeout.
std::shared_ptr<Communicator> make_engine(const std::string& name, const GroupInfo& group,
                                          const EngineOptions& options);

}  // namespace lockstep::comm::engines
