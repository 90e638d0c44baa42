#include <lockstep/parallel/pipeline/schedule/check.h>

#include <map>
#include <optional>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/schedule/action_positions.h>

namespace lockstep::pipeline {

namespace {

constexpr int kNowhere = ActionPositions::kNowhere;

// "rank 1, action 7 (B1.2)"
std::string place_text(int rank, int position, const Action& action) {
  return fmt::format("rank {}, action {} ({})", rank, position, to_text(action));
}

void check_stages(const Schedule& schedule) {
  if (schedule.num_micro_batches < 1)
    throw UsageError("the schedule has {} micro-batches: at least 1 is needed",
                     schedule.num_micro_batches);
  std::vector<bool> has_stage(schedule.actions.size());
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    const int rank = schedule.rank_of_stage[static_cast<std::size_t>(stage)];
    if (rank < 0 || rank >= schedule.num_ranks())
      throw UsageError("stage {} is on rank {}, and there are {} ranks", stage, rank,
                       schedule.num_ranks());
    has_stage[static_cast<std::size_t>(rank)] = true;
  }
  for (std::size_t rank = 0; rank < has_stage.size(); ++rank)
    if (!has_stage[rank]) throw UsageError("rank {} has no stage", rank);
  if (schedule.actions.empty()) throw UsageError("the schedule has no ranks");
  // Known to be short of some before memory is taken for all.
  std::size_t there = 0;
  for (const auto& actions : schedule.actions) there += actions.size();
  const auto forwards = static_cast<std::size_t>(schedule.num_stages()) *
                        static_cast<std::size_t>(schedule.num_micro_batches);
  if (there < 2 * forwards)
    throw UsageError("the schedule has {} actions: {} stages and {} micro-batches need {} forwards "
                     "and as many backwards",
                     there, schedule.num_stages(), schedule.num_micro_batches, forwards);
}

class Checker {
 public:
  explicit Checker(const Schedule& schedule)
      : schedule_(schedule), positions_(schedule.num_stages(), schedule.num_micro_batches) {}

  void run() {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) place_actions(rank);
    for (int stage = 0; stage < schedule_.num_stages(); ++stage)
      for (int i = 0; i < schedule_.num_micro_batches; ++i) check_complete(stage, i);
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) check_channels(rank);
    check_deadlock();
  }

 private:
  int rank_of(const Action& action) const {
    return schedule_.rank_of_stage[static_cast<std::size_t>(action.stage)];
  }
  const std::vector<Action>& actions_of(int rank) const {
    return schedule_.actions[static_cast<std::size_t>(rank)];
  }
  std::string where(const Action& action) const {
    return place_text(rank_of(action), positions_[action], action);
  }

  void place_actions(int rank) {
    const auto& actions = actions_of(rank);
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const Action& action = actions[i];
      const auto fail = [&](const std::string& what) {
        throw UsageError("{}: {}", place_text(rank, static_cast<int>(i), action), what);
      };
      if (action.stage < 0 || action.stage >= schedule_.num_stages())
        fail(fmt::format("there is no stage {}, but {} of them", action.stage,
                         schedule_.num_stages()));
      if (action.micro_batch < 0 || action.micro_batch >= schedule_.num_micro_batches)
        fail(fmt::format("there is no micro-batch {}, but {} of them", action.micro_batch,
                         schedule_.num_micro_batches));
      if (rank_of(action) != rank)
        fail(fmt::format("stage {} is on rank {}", action.stage, rank_of(action)));
      if (is_transfer(action.kind)) {
        const int other = other_end(action).stage;
        if (!is_sent(schedule_, action.stage, other))
          fail(other < 0 || other >= schedule_.num_stages()
                   ? "there is no stage at its other end"
                   : fmt::format("stage {} is on this rank, too, and needs no transfer", other));
      }
      int& position = positions_[action];
      if (position != kNowhere)
        fail(fmt::format("it stands there a second time, after action {}", position));
      position = static_cast<int>(i);
    }
  }

  void require(const Action& action, const Action& because_of) const {
    if (positions_[action] == kNowhere)
      throw UsageError("rank {} has no {}, which {} needs", rank_of(action), to_text(action),
                       where(because_of));
  }
  // Both are there and on one rank.
  void require_order(const Action& first, const Action& second) const {
    if (positions_[first] > positions_[second])
      throw UsageError("{}: it stands before {}, action {}, which has to come first", where(second),
                       to_text(first), positions_[first]);
  }

  void check_complete(int stage, int micro_batch) const {
    const auto action = [&](ActionKind kind) { return Action{kind, stage, micro_batch}; };
    const auto has = [&](ActionKind kind) { return positions_[action(kind)] != kNowhere; };
    const Action forward = action(ActionKind::forward);
    const Action input = action(ActionKind::backward_input);
    const Action weight = action(ActionKind::backward_weight);
    const Action backward = positions_.input_backward(stage, micro_batch);
    if (!has(ActionKind::forward))
      throw UsageError("rank {} has no {}: each stage computes each micro-batch", rank_of(forward),
                       to_text(forward));
    if (has(ActionKind::backward)) {
      for (const Action& half : {input, weight})
        if (has(half.kind))
          throw UsageError("{}: it is a part of {}, action {}, which is there, too", where(half),
                           to_text(backward), positions_[backward]);
    } else if (!has(ActionKind::backward_input) && !has(ActionKind::backward_weight)) {
      throw UsageError("rank {} has no {}, nor {} and {}: each forward has its backward",
                       rank_of(forward), to_text(action(ActionKind::backward)), to_text(input),
                       to_text(weight));
    } else {
      require(input, has(ActionKind::backward_input) ? input : weight);
      require(weight, input);
      require_order(input, weight);
    }
    require_order(forward, backward);

    if (is_sent(schedule_, stage - 1, stage))
      check_transfer({ActionKind::receive_activation, stage, micro_batch}, forward,
                     {ActionKind::forward, stage - 1, micro_batch});
    if (is_sent(schedule_, stage + 1, stage)) {
      // Whether that one is there is found when it is its turn.
      const Action producer = positions_.input_backward(stage + 1, micro_batch);
      check_transfer({ActionKind::receive_gradient, stage, micro_batch}, backward, producer);
    }
  }

  void check_transfer(const Action& receive, const Action& needs_it, const Action& makes_it) const {
    const Action send = other_end(receive);
    require(receive, needs_it);
    require_order(receive, needs_it);
    require(send, receive);
    if (positions_[makes_it] != kNowhere) require_order(makes_it, send);
  }

  // That what arrives from each rank is what was sent next.
  void check_channels(int rank) const {
    std::map<int, Action> last;  // received, from each rank
    for (const Action& receive : actions_of(rank)) {
      if (!is_receive(receive.kind)) continue;
      const Action send = other_end(receive);
      const auto [before, first] = last.try_emplace(rank_of(send), receive);
      if (first) continue;
      const Action earlier = other_end(before->second);
      if (positions_[send] < positions_[earlier])
        throw UsageError("{}: it stands behind {}, but rank {} sends {} (action {}) before {} "
                         "(action {}), and what goes from rank to rank arrives in order",
                         where(receive), to_text(before->second), rank_of(send), to_text(send),
                         positions_[send], to_text(earlier), positions_[earlier]);
      before->second = receive;
    }
  }

  // What an action that computes waits for, where it waits for one: an action that was reached.
  std::optional<Action> waits_for(const Action& action) const {
    const int stage = action.stage;
    const int i = action.micro_batch;
    if (action.kind == ActionKind::forward && stage > 0)
      return is_sent(schedule_, stage - 1, stage)
                 ? Action{ActionKind::send_activation, stage - 1, i}
                 : Action{ActionKind::forward, stage - 1, i};
    const bool needs_gradient =
        action.kind == ActionKind::backward || action.kind == ActionKind::backward_input;
    if (needs_gradient && stage + 1 < schedule_.num_stages())
      return is_sent(schedule_, stage + 1, stage) ? Action{ActionKind::send_gradient, stage + 1, i}
                                                  : positions_.input_backward(stage + 1, i);
    return std::nullopt;
  }

  // Runs it without times. A receive stands before its need, so that only sends decide.
  void check_deadlock() const {
    std::vector<int> next(schedule_.actions.size());
    for (bool any = true; any;) {
      any = false;
      for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
        int& at = next[static_cast<std::size_t>(rank)];
        const auto& actions = actions_of(rank);
        for (; at < static_cast<int>(actions.size()); ++at, any = true) {
          const auto needed = waits_for(actions[static_cast<std::size_t>(at)]);
          if (needed && next[static_cast<std::size_t>(rank_of(*needed))] <= positions_[*needed])
            break;
        }
      }
    }
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank)
      if (next[static_cast<std::size_t>(rank)] < static_cast<int>(actions_of(rank).size()))
        throw_deadlock(rank, next);
  }

  // Follows who waits for whom until it comes round.
  [[noreturn]] void throw_deadlock(int rank, const std::vector<int>& next) const {
    constexpr int kMostNamed = 6;
    std::string chain;
    std::vector<bool> seen(schedule_.actions.size());
    int named = 0;
    for (; !seen[static_cast<std::size_t>(rank)] && named < kMostNamed; ++named) {
      seen[static_cast<std::size_t>(rank)] = true;
      const int at = next[static_cast<std::size_t>(rank)];
      const Action& stuck = actions_of(rank)[static_cast<std::size_t>(at)];
      const Action needed = *waits_for(stuck);
      chain += fmt::format("{}{} waits for {}, action {} of rank {}", named == 0 ? "" : "; ",
                           place_text(rank, at, stuck), to_text(needed), positions_[needed],
                           rank_of(needed));
      rank = rank_of(needed);
    }
    throw UsageError("the schedule ends in a deadlock: {}{}", chain,
                     seen[static_cast<std::size_t>(rank)] ? "" : "; …");
  }

  const Schedule& schedule_;
  ActionPositions positions_;
};

}  // namespace

void check(const Schedule& schedule) {
  check_stages(schedule);
  Checker(schedule).run();
}

}  // namespace lockstep::pipeline
