// Log lines on standard error, with the rank in the prefix. Rank 0 speaks at info, the others from
// warning on, so that a thousand ranks do not say the same thing a thousand times.
//
// The level can be set for all ranks with LOCKSTEP_LOG (trace, debug, info, warn, error, off).
#pragma once

#include <spdlog/spdlog.h>

namespace lockstep::log {

using spdlog::debug;
using spdlog::error;
using spdlog::info;
using spdlog::trace;
using spdlog::warn;

// Called once the process knows who it is; before that, lines carry no rank. Thread-safe.
void set_rank(int rank, int world_size);

// For programs that are no rank (the launcher, `lockstep check`): `name` stands in the prefix.
void set_name(const std::string& name);

}  // namespace lockstep::log
