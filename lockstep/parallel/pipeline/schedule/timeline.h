// When each rank computed which action, measured or simulated, and how long it was idle.
#pragma once

#include <vector>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

struct Span {
  double start = 0;
  double end = 0;
  Action action;
};

// The actions that each rank computed, with times in any unit. A rank that waits for a transfer is
// idle.
struct Timeline {
  std::vector<std::vector<Span>> ranks;  // each rank's in order, without overlap
  // Whether one clock measured all ranks. If not, each rank's times count from its own start, and
  // do not show how long it waited for others before that.
  bool one_clock = true;

  // The first start and the last end of all ranks; 0 where there is no span.
  double start() const;
  double end() const;
  double makespan() const { return end() - start(); }
};

// The share of the makespan that ranks are idle, over all of them: 1 - busy / (ranks × makespan).
double bubble(const Timeline& timeline);

// The idle share if ranks start the next step without waiting for each other. Instead of the
// makespan it counts the longest time from a rank's own start to its own end: later ranks start
// later and end later, which costs nothing then. Papers on zero-bubble schedules call this the
// bubble.
double bubble_between_own_ends(const Timeline& timeline);

// Times of one micro-batch, in any unit. A backward that is not split takes both of its halves.
struct StageTimes {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
};

struct SimulatedTimes {
  std::vector<StageTimes> stages = {{}};  // one for each stage, or one for all
  double transfer = 0;
};

// Runs `schedule` by its rules: a transfer starts when both its ranks have started it and the one
// before it in its channel is over. UsageError for a time that is negative or not finite, for a
// number of times other than one or one a stage, and for a schedule that check() refuses.
Timeline simulate(const Schedule& schedule, const SimulatedTimes& times = {});

}  // namespace lockstep::pipeline
