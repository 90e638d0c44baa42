// A pipeline schedule is data: what each rank does in a step, in order.
//
// What the lists mean, to whoever runs them, simulates them or checks them:
// - A rank takes its list from the front. An action that computes waits for its input and then has
//   the rank for itself; a transfer is only started, and the rank goes on at once.
// - Between two ranks there is a channel each way. What goes through it arrives in the order in
//   which it was sent, activations and gradients alike, so the receives of a channel stand in the
//   order of its sends.
// - A send stands behind the action that computes what it sends; a receive before the one that
//   needs what it brings, early enough to arrive meanwhile and no earlier, as its memory is taken
//   when it starts.
// - Stages that follow each other on one rank hand over what they have without a transfer.
#pragma once

#include <string>
#include <vector>

#include <lockstep/parallel/pipeline/schedule/action.h>

namespace lockstep::pipeline {

struct Schedule {
  std::string name;  // "1f1b"
  int num_micro_batches = 0;
  std::vector<int> rank_of_stage;            // for each stage of the model, first to last
  std::vector<std::vector<Action>> actions;  // for each rank

  int num_ranks() const { return static_cast<int>(actions.size()); }
  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }

  bool operator==(const Schedule&) const = default;
};

// Whether what stage `from` computes is sent to its neighbour `to`: it need not be there.
inline bool is_sent(const Schedule& schedule, int from, int to) {
  if (from < 0 || to < 0 || from >= schedule.num_stages() || to >= schedule.num_stages())
    return false;
  const auto rank = [&](int stage) {
    return schedule.rank_of_stage[static_cast<std::size_t>(stage)];
  };
  return rank(from) != rank(to);
}

}  // namespace lockstep::pipeline
