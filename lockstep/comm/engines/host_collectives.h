// The collectives of our interface, made of what every host engine has.
#pragma once

#include <lockstep/comm/call.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/comm/engines/host_engine.h>

namespace lockstep::comm::engines {

// Runs any call but an exchange; `engine` is null for a group of one. Throws what the engine does,
// and CommError (mismatch) where the parts of an all_to_all do not fit.
void run_collective(HostEngine* engine, const Call& call, const GroupInfo& group);

}  // namespace lockstep::comm::engines
