// Whether this machine can hold a run: found out before any rank starts.
#pragma once

#include <lockstep/train/config/config.h>
#include <lockstep/train/preflight/run_plan.h>

namespace lockstep::cli {

// UsageError with the numbers and the way out, where there is no GPU though the config asks for
// one, too little memory or disk, or another run in the run's folder.
void check_machine(const train::TrainConfig& config, const train::ResolvedRun& run, int num_ranks);

}  // namespace lockstep::cli
