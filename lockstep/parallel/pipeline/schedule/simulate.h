// How long a schedule would take.
#pragma once

#include <vector>

#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>

namespace lockstep::pipeline {

// Of one micro-batch, in any unit. A backward that is not split takes both of its halves.
struct StageTimes {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
};

struct SimulatedTimes {
  std::vector<StageTimes> stages = {{}};  // of each stage, or one for all
  double transfer = 0;
};

// Runs `schedule` by its rules: a transfer starts when both its ends have, and the one before it in
// its channel is over. UsageError for a time below zero or none, another number of them than there
// are stages, and what check() refuses.
Timeline simulate(const Schedule& schedule, const SimulatedTimes& times = {});

}  // namespace lockstep::pipeline
