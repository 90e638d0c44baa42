// Ranks of a run read the same config, and the same in the files that it names. UsageError on all
// ranks, with the first thing that differs, where they do not; every rank calls these.
#pragma once

#include <lockstep/distributed/rank_messages.h>
#include <lockstep/train/config.h>
#include <lockstep/train/plan.h>

namespace lockstep::train {

void check_same_config(const TrainConfig& config, const RankMessages& ranks);

// What is in the files that it names, wherever a host has them: the model that is trained further,
// the pipeline's schedule, and the tokens, as far as a digest sees them.
void check_same_files(const RunPlan& plan, const RankMessages& ranks);

}  // namespace lockstep::train
