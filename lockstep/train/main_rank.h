// Work that one rank does for all of them, so that they go on together or stop together.
#pragma once

#include <functional>
#include <string>

#include <lockstep/distributed/distributed.h>

namespace lockstep::train {

// The main rank calls `work`, and every rank returns its result. An exception is rethrown on the
// main rank; on the others it is a TrainingStopped with the same words. A CommError is a CommError
// on all ranks.
std::string on_main_rank(const DistributedManager& dist, const std::function<std::string()>& work);

// The same for what the caller can mend: if the main rank throws, all ranks throw a UsageError.
std::string asked_of_main_rank(const DistributedManager& dist,
                               const std::function<std::string()>& work);

}  // namespace lockstep::train
