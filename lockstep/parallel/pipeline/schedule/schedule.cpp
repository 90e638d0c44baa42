#include <lockstep/parallel/pipeline/schedule/schedule.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <vector>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

// Where each action stands in its rank's list, from 0; kNowhere if the schedule does not have it.
class ActionPositions {
 public:
  static constexpr int kNowhere = -1;

  explicit ActionPositions(const Schedule& schedule)
      : num_micro_batches_(static_cast<std::size_t>(schedule.num_micro_batches)),
        positions_(schedule.rank_of_stage.size() * num_micro_batches_, kNone) {}

  int& operator[](const Action& action) { return positions_[index(action)][kind(action)]; }
  int operator[](const Action& action) const { return positions_[index(action)][kind(action)]; }

  // The backward that computes the gradient of the stage's input: the whole one or the input's.
  Action input_backward(int stage, int micro_batch) const {
    const Action whole = {ActionKind::backward, stage, micro_batch};
    return (*this)[whole] != kNowhere ? whole
                                      : Action{ActionKind::backward_input, stage, micro_batch};
  }

 private:
  using OfKinds = std::array<int, kNumActionKinds>;
  static constexpr OfKinds kNone = {kNowhere, kNowhere, kNowhere, kNowhere,
                                    kNowhere, kNowhere, kNowhere, kNowhere};

  static std::size_t kind(const Action& action) { return static_cast<std::size_t>(action.kind); }
  std::size_t index(const Action& action) const {
    return static_cast<std::size_t>(action.stage) * num_micro_batches_ +
           static_cast<std::size_t>(action.micro_batch);
  }

  std::size_t num_micro_batches_;
  std::vector<OfKinds> positions_;
};

constexpr std::array<std::string_view, kNumActionKinds> kLetters = {"F",  "B",  "I",  "W",
                                                                    "SA", "RA", "SG", "RG"};
// A number of more digits may not fit into an int.
constexpr std::size_t kMostDigits = 9;

std::optional<int> parse_number(std::string_view digits) {
  if (digits.empty() || digits.size() > kMostDigits) return std::nullopt;
  // Each number has one spelling: without a sign or leading zeros.
  if (digits.front() < '0' || digits.front() > '9') return std::nullopt;
  if (digits.front() == '0' && digits.size() > 1) return std::nullopt;
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return number;
}

}  // namespace

Action other_end(const Action& transfer) {
  const int stage = transfer.stage;
  switch (transfer.kind) {
    case ActionKind::send_activation:
      return {ActionKind::receive_activation, stage + 1, transfer.micro_batch};
    case ActionKind::receive_activation:
      return {ActionKind::send_activation, stage - 1, transfer.micro_batch};
    case ActionKind::send_gradient:
      return {ActionKind::receive_gradient, stage - 1, transfer.micro_batch};
    case ActionKind::receive_gradient:
      return {ActionKind::send_gradient, stage + 1, transfer.micro_batch};
    default: break;
  }
  LOCKSTEP_CHECK(false, "{} is no transfer", to_text(transfer));
  return transfer;
}

std::string to_text(const Action& action) {
  return fmt::format("{}{}.{}", kLetters.at(static_cast<std::size_t>(action.kind)), action.stage,
                     action.micro_batch);
}

std::optional<Action> parse_action(std::string_view text) {
  const auto digits = text.find_first_of("0123456789");
  const auto dot = text.find('.');
  if (digits == std::string_view::npos || dot == std::string_view::npos || dot < digits)
    return std::nullopt;
  const auto stage = parse_number(text.substr(digits, dot - digits));
  const auto micro_batch = parse_number(text.substr(dot + 1));
  if (!stage || !micro_batch) return std::nullopt;
  for (std::size_t kind = 0; kind < kLetters.size(); ++kind) {
    if (kLetters[kind] == text.substr(0, digits))
      return Action{static_cast<ActionKind>(kind), *stage, *micro_batch};
  }
  return std::nullopt;
}

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
  // Too short a list is found before memory is taken for all actions that it says it has.
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
  explicit Checker(const Schedule& schedule) : schedule_(schedule), positions_(schedule) {}

  void check_places() {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) place_actions(rank);
  }

  void run() {
    check_places();
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
  // Both actions are there, on one rank.
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
      // Its own stage's turn checks that the producer is in the schedule.
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

  // Receives from each rank stand in the order in which it sends.
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

  // The action that has to be reached before this one can compute, if there is one.
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

  // Runs the lists without times. Receives stand before the actions that need them, so only sends
  // can block.
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

  // Follows the ranks that wait for each other until one comes a second time.
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

void check_places(const Schedule& schedule) {
  check_stages(schedule);
  Checker(schedule).check_places();
}

namespace {

// The send that follows an action that computes, if there is one.
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

struct Receive {
  Action action;
  std::size_t before;  // the position of the computing action that it stands before
};

}  // namespace

Schedule with_transfers(const Schedule& schedule) {
  ActionPositions positions(schedule);
  for (const auto& actions : schedule.actions)
    for (std::size_t i = 0; i < actions.size(); ++i) positions[actions[i]] = static_cast<int>(i);
  // For each receiver the receives from each sender, in the order in which they are sent.
  std::vector<std::map<int, std::vector<Receive>>> channels(schedule.actions.size());
  for (std::size_t sender = 0; sender < schedule.actions.size(); ++sender)
    for (const Action& action : schedule.actions[sender]) {
      LOCKSTEP_CHECK(!is_transfer(action.kind), "{}", to_text(action));
      const auto send = send_after(schedule, action);
      if (!send) continue;
      const Action receive = other_end(*send);
      const Action needs_it = receive.kind == ActionKind::receive_activation
                                  ? Action{ActionKind::forward, receive.stage, receive.micro_batch}
                                  : positions.input_backward(receive.stage, receive.micro_batch);
      const auto need = static_cast<std::size_t>(std::max(positions[needs_it], 0));
      const int receiver = schedule.rank_of_stage[static_cast<std::size_t>(receive.stage)];
      channels[static_cast<std::size_t>(receiver)][static_cast<int>(sender)].push_back(
          {receive, need - std::min<std::size_t>(need, 1)});
    }

  Schedule complete = schedule;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    const auto& computing = schedule.actions[rank];
    std::vector<std::vector<Action>> receives(computing.size());
    for (auto& [sender, channel] : channels[rank]) {
      // A receive may not start after one whose message is sent later.
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

std::vector<LiveForwards> live_forwards(const Schedule& schedule) {
  std::vector<LiveForwards> peaks;
  for (const auto& actions : schedule.actions) {
    LiveForwards now;
    LiveForwards peak;
    for (const Action& action : actions) {
      const bool whole = action.kind == ActionKind::backward;
      if (action.kind == ActionKind::forward) {
        ++now.until_input;
        ++now.until_weight;
      }
      if (whole || action.kind == ActionKind::backward_input) --now.until_input;
      if (whole || action.kind == ActionKind::backward_weight) --now.until_weight;
      peak.until_input = std::max(peak.until_input, now.until_input);
      peak.until_weight = std::max(peak.until_weight, now.until_weight);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace lockstep::pipeline
