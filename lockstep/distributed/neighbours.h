// Which rank keeps a copy of which other's state. No LibTorch, no communication.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

// For each rank the one that its copy goes to; every rank has the copy of one. On another host than
// the rank itself wherever that can be: of a host with more than half of the ranks, so many more
// stay on it. A rank without another one is its own.
std::vector<int> keepers(const std::vector<std::string>& host_of_rank);

}  // namespace lockstep
