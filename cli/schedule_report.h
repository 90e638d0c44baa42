// What `lockstep plan schedule` tells.
#pragma once

#include <string>

#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>

namespace lockstep::cli {

// "4 ranks with 2 stages each, 8 micro-batches"
std::string about_schedule(const pipeline::Schedule& schedule);

// The same for a drawing, with the bubble that is left where no rank waits for the others between
// steps.
std::string about_drawing(const pipeline::Schedule& schedule, const pipeline::Timeline& timeline);

// The bubble, and for each rank its stages, how long it is idle and how much it holds.
std::string schedule_table(const pipeline::Schedule& schedule, const pipeline::Timeline& timeline);

}  // namespace lockstep::cli
