// The behaviour of a rank in a job that goes wrong: --scenario <name>.
#pragma once

#include <string>

namespace lockstep::comm::conformance {

// Joins, fails as the scenario says, and prints the error that it gets. Returns the rank's exit
// code.
int run_scenario(const std::string& name);

}  // namespace lockstep::comm::conformance
