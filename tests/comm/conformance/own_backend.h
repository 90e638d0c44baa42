// A backend as a program outside the tree would write it, using only public headers: it carries
// calls over tcp and counts them.
#pragma once

#include <string>

namespace lockstep::comm::conformance {

inline const std::string kOwnBackend = "counting-tcp";

void register_own_backend();

// The number of calls that its groups have carried in this process.
int num_calls_of_own_backend();

}  // namespace lockstep::comm::conformance
