#include <lockstep/parallel/pipeline/schedule/transfers.h>

#include <algorithm>
#include <map>
#include <optional>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

// What is sent when an action that computes is done.
std::optional<Action> send_after(const Schedule& schedule, const Action& action) {
  const int stage = action.stage;
  switch (action.kind) {
    case ActionKind::forward:
      if (!is_sent(schedule, stage, stage + 1)) return std::nullopt;
      return Action{ActionKind::send_activation, stage, action.micro_batch};
    case ActionKind::backward:
    case ActionKind::backward_input:
      if (!is_sent(schedule, stage, stage - 1)) return std::nullopt;
      return Action{ActionKind::send_gradient, stage, action.micro_batch};
    default: return std::nullopt;
  }
}

// Where each forward and each input's backward stands in its rank's list.
class Positions {
 public:
  explicit Positions(const Schedule& schedule)
      : num_micro_batches_(static_cast<std::size_t>(schedule.num_micro_batches)),
        forwards_(schedule.rank_of_stage.size() * num_micro_batches_),
        backwards_(forwards_.size()) {
    for (const auto& actions : schedule.actions)
      for (std::size_t i = 0; i < actions.size(); ++i) {
        if (actions[i].kind == ActionKind::backward_weight) continue;
        (actions[i].kind == ActionKind::forward ? forwards_ : backwards_)[index(actions[i])] = i;
      }
  }

  // Of the action that needs what a receive brings.
  std::size_t of_need(const Action& receive) const {
    return (receive.kind == ActionKind::receive_activation ? forwards_
                                                           : backwards_)[index(receive)];
  }

 private:
  std::size_t index(const Action& action) const {
    return static_cast<std::size_t>(action.stage) * num_micro_batches_ +
           static_cast<std::size_t>(action.micro_batch);
  }

  std::size_t num_micro_batches_;
  std::vector<std::size_t> forwards_;
  std::vector<std::size_t> backwards_;
};

struct Receive {
  Action action;
  std::size_t before;  // the position, among the actions that compute, that it stands before
};

}  // namespace

Schedule with_transfers(const Schedule& schedule) {
  const Positions positions(schedule);
  // For each receiver those of each sender, in the order in which they are sent.
  std::vector<std::map<int, std::vector<Receive>>> channels(schedule.actions.size());
  for (std::size_t sender = 0; sender < schedule.actions.size(); ++sender)
    for (const Action& action : schedule.actions[sender]) {
      LOCKSTEP_CHECK(!is_transfer(action.kind), "{}", to_text(action));
      const auto send = send_after(schedule, action);
      if (!send) continue;
      const Action receive = other_end(*send);
      const std::size_t need = positions.of_need(receive);
      const int receiver = schedule.rank_of_stage[static_cast<std::size_t>(receive.stage)];
      channels[static_cast<std::size_t>(receiver)][static_cast<int>(sender)].push_back(
          {receive, need - std::min<std::size_t>(need, 1)});
    }

  Schedule complete = schedule;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    const auto& computing = schedule.actions[rank];
    std::vector<std::vector<Action>> receives(computing.size());
    for (auto& [sender, channel] : channels[rank]) {
      // None may start after one that was sent later.
      for (std::size_t i = channel.size() - 1; i-- > 0;)
        channel[i].before = std::min(channel[i].before, channel[i + 1].before);
      for (const Receive& receive : channel) receives[receive.before].push_back(receive.action);
    }
    auto& actions = complete.actions[rank];
    actions.clear();
    for (std::size_t i = 0; i < computing.size(); ++i) {
      actions.insert(actions.end(), receives[i].begin(), receives[i].end());
      actions.push_back(computing[i]);
      if (const auto send = send_after(schedule, computing[i])) actions.push_back(*send);
    }
  }
  return complete;
}

}  // namespace lockstep::pipeline
