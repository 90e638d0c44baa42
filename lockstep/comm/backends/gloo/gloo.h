// Gloo, through c10d: for people who rely on it, and to compare with. Our own shm and tcp are an
// order of magnitude faster and promise more.
//
// Gloo cannot promise some things (docs/engines.md has the whole list):
//   - Sums come in Gloo's order: equal on all ranks, within rounding of the canonical one.
//   - Gloo ends the process (std::terminate) when a message is longer than expected. So every call
//     is compared between ranks before it starts, one round to the store; with LedgerMode::beside
//     that protection is gone.
//   - A link that fails is noticed only at the deadline.
//   - Its connections are not authenticated.
#pragma once

#include <memory>

#include <lockstep/comm/backends/engine/engine_group.h>
#include <lockstep/comm/communicator.h>

namespace lockstep::comm::backends {

// The group's ranks find each other in options.store.
std::shared_ptr<Communicator> make_gloo(const GroupInfo& group, const EngineOptions& options);

}  // namespace lockstep::comm::backends
