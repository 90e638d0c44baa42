// What one rank does for all of them, so that they go on together or stop together.
#pragma once

#include <functional>
#include <string>

#include <lockstep/distributed/distributed.h>

namespace lockstep::train {

// The main rank calls `work`; its result is every rank's. What it throws is rethrown on the main
// rank, and is a TrainingStopped with the same words on the others, but a CommError is one on all.
std::string on_main_rank(const DistributedManager& dist, const std::function<std::string()>& work);

}  // namespace lockstep::train
