// Ranks of a run read the same config and the same data. UsageError on all ranks, with the first
// thing that differs, where they do not; every rank calls these.
#pragma once

#include <lockstep/distributed/rank_messages.h>
#include <lockstep/train/config.h>
#include <lockstep/train/plan.h>

namespace lockstep::train {

void check_same_config(const TrainConfig& config, const RankMessages& ranks);

// Its tokens, as far as a digest sees them.
void check_same_data(const RunPlan& plan, const RankMessages& ranks);

}  // namespace lockstep::train
