// How many activations a schedule holds.
#pragma once

#include <vector>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

// The most micro-batches at once, counted once for each of the rank's stages that has computed one
// forward and not yet backward.
struct LiveForwards {
  int until_input = 0;   // up to the end of the input's backward
  int until_weight = 0;  // up to the end of all of it, which is the same where it is not split
};

// For each rank.
std::vector<LiveForwards> live_forwards(const Schedule& schedule);

}  // namespace lockstep::pipeline
