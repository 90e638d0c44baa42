// When each rank computed what: simulated, or measured.
#pragma once

#include <vector>

#include <lockstep/parallel/pipeline/schedule/action.h>

namespace lockstep::pipeline {

struct Span {
  double start = 0;
  double end = 0;
  Action action;
};

// Times are in any unit. Only actions that compute are in it: while a rank waits for a transfer, it
// is idle.
struct Timeline {
  std::vector<std::vector<Span>> ranks;  // of each rank in order, without overlap
  // Whether one clock measured all ranks. Where it did not, each rank's times are from its own
  // start: how long it waited for others before that is not in them.
  bool one_clock = true;

  // The first start and the last end of all ranks; 0 where there is no span.
  double start() const;
  double end() const;
  double makespan() const { return end() - start(); }
};

// The share of the makespan that ranks are idle, over all of them: 1 - busy / (ranks × makespan).
double bubble(const Timeline& timeline);

// The same where a rank starts its next step without waiting for the others: of the longest time
// that a rank takes from its own start to its own end. Ranks far down start later and end later,
// and that is no loss then. It is what the papers on zero-bubble schedules call the bubble.
double bubble_between_own_ends(const Timeline& timeline);

}  // namespace lockstep::pipeline
