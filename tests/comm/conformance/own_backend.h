// A backend of a program's own, made of public headers alone: it carries calls over tcp, and counts
// them.
#pragma once

#include <string>

namespace lockstep::comm::conformance {

inline const std::string kOwnBackend = "counting-tcp";

void register_own_backend();

// How many calls its groups have carried in this process.
int num_calls_of_own_backend();

}  // namespace lockstep::comm::conformance
