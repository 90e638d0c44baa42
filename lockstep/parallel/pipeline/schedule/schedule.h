// A pipeline schedule is data: the list of actions that each rank does in a step, in order.
//
// The executor, the simulator and the checks of schedules all follow these rules:
// - A rank takes its list from the front. An action that computes waits for its input and then has
//   the rank for itself; a transfer is only started, and the rank goes on at once.
// - Between two ranks there is a channel each way. Messages arrive in the order in which they were
//   sent, activations and gradients alike, so the receives of a channel stand in the order of its
//   sends.
// - A send stands behind the action that computes its message. A receive stands before the action
//   that needs the message: early enough for it to arrive meanwhile, and no earlier, because its
//   memory is taken when it starts.
// - Stages that follow each other on one rank pass their results on without a transfer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::pipeline {

enum class ActionKind : std::uint8_t {
  forward,
  backward,            // both halves below at once
  backward_input,      // the gradient of the stage's input, which the stage before waits for
  backward_weight,     // the gradients of its parameters, which nobody waits for
  send_activation,     // the stage's output, to the stage after it
  receive_activation,  // the stage's input, from the stage before it
  send_gradient,       // the gradient of the stage's input, to the stage before it
  receive_gradient,    // the gradient of the stage's output, from the stage after it
};
inline constexpr int kNumActionKinds = 8;

// Stages are numbered over the whole model and micro-batches over the step, both from 0. The stage
// of a transfer is the one on this rank.
struct Action {
  ActionKind kind = ActionKind::forward;
  int stage = 0;
  int micro_batch = 0;

  bool operator==(const Action&) const = default;
};

constexpr bool is_send(ActionKind kind) {
  return kind == ActionKind::send_activation || kind == ActionKind::send_gradient;
}
constexpr bool is_receive(ActionKind kind) {
  return kind == ActionKind::receive_activation || kind == ActionKind::receive_gradient;
}
constexpr bool is_transfer(ActionKind kind) { return is_send(kind) || is_receive(kind); }

// The receive that belongs to a send, or the send that belongs to a receive. Its stage need not
// exist.
Action other_end(const Action& transfer);

// "F0.3" is the forward of micro-batch 3 through stage 0. B, I and W are the kinds of backward (I
// of the input, W of the weights), SA and RA send and receive activations, SG and RG gradients.
std::string to_text(const Action& action);

// Nothing where the text is not one that to_text() writes.
std::optional<Action> parse_action(std::string_view text);

struct Schedule {
  std::string name;  // "1f1b"
  int num_micro_batches = 0;
  std::vector<int> rank_of_stage;            // for each stage of the model, first to last
  std::vector<std::vector<Action>> actions;  // for each rank

  int num_ranks() const { return static_cast<int>(actions.size()); }
  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }

  bool operator==(const Schedule&) const = default;
};

// Whether the result of stage `from` is sent to its neighbour `to`, which need not exist.
inline bool is_sent(const Schedule& schedule, int from, int to) {
  if (from < 0 || to < 0 || from >= schedule.num_stages() || to >= schedule.num_stages())
    return false;
  const auto rank = [&](int stage) {
    return schedule.rank_of_stage[static_cast<std::size_t>(stage)];
  };
  return rank(from) != rank(to);
}

// Proves that every rank comes to the end of its list, with the forward and the backward of every
// micro-batch through every stage done once: each stage is on a rank that exists, each action on
// the rank of its stage, backward after forward and weights after the input, each transfer in the
// lists of both its ranks and in the same order there, and no rank waits for another that waits for
// it. Otherwise throws UsageError, which names the rank, the action and its position, from 0.
void check(const Schedule& schedule);
// The first part of it: each stage is on a rank that exists, and each action on the rank of its
// stage, once. Lists without transfers pass, too.
void check_places(const Schedule& schedule);

// The same schedule with its sends and receives. `schedule` passes check_places() and has only
// actions that compute. A result is sent as soon as it is computed. A receive starts one action
// ahead of the one that needs it, so that it is hidden behind that one, or earlier where the order
// of its channel requires it.
Schedule with_transfers(const Schedule& schedule);

// The most forwards whose activations a rank holds at once: a micro-batch counts once for each of
// the rank's stages that has computed its forward and not yet its backward.
struct LiveForwards {
  int until_input = 0;   // held until the end of the input's backward
  int until_weight = 0;  // held until the end of the whole backward
};

// One for each rank.
std::vector<LiveForwards> live_forwards(const Schedule& schedule);

}  // namespace lockstep::pipeline
