// What a rank of a job that goes wrong does: --scenario <name>.
#pragma once

#include <string>

namespace lockstep::comm::conformance {

// Joins, fails as the scenario says, and prints what it was told. The exit code of the rank.
int run_scenario(const std::string& name);

}  // namespace lockstep::comm::conformance
