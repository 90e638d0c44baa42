#include <lockstep/parallel/pipeline/schedule/timeline.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

namespace {

double busy(const Timeline& timeline) {
  double sum = 0;
  for (const auto& spans : timeline.ranks)
    for (const Span& span : spans) sum += span.end - span.start;
  return sum;
}

// 0 where nothing takes any time.
double idle_share(const Timeline& timeline, double duration) {
  const double all = duration * static_cast<double>(timeline.ranks.size());
  return all > 0 ? 1 - busy(timeline) / all : 0;
}

}  // namespace

double Timeline::start() const {
  double first = std::numeric_limits<double>::infinity();
  for (const auto& spans : ranks)
    if (!spans.empty()) first = std::min(first, spans.front().start);
  return first == std::numeric_limits<double>::infinity() ? 0 : first;
}

double Timeline::end() const {
  double last = -std::numeric_limits<double>::infinity();
  for (const auto& spans : ranks)
    if (!spans.empty()) last = std::max(last, spans.back().end);
  return last == -std::numeric_limits<double>::infinity() ? 0 : last;
}

double bubble(const Timeline& timeline) { return idle_share(timeline, timeline.makespan()); }

double bubble_between_own_ends(const Timeline& timeline) {
  double longest = 0;
  for (const auto& spans : timeline.ranks)
    if (!spans.empty()) longest = std::max(longest, spans.back().end - spans.front().start);
  return idle_share(timeline, longest);
}

namespace {

void check_times(const Schedule& schedule, const SimulatedTimes& times) {
  const auto stages = static_cast<std::size_t>(schedule.num_stages());
  if (times.stages.size() != 1 && times.stages.size() != stages)
    throw UsageError(
        "there are times for {} stages, and the schedule has {}: give one for each, or "
        "one for all",
        times.stages.size(), stages);
  const auto check_time = [](double time) {
    if (!std::isfinite(time) || time < 0)
      throw UsageError("a stage or a transfer cannot take a time of {}", time);
  };
  check_time(times.transfer);
  for (const StageTimes& stage : times.stages)
    for (const double time : {stage.forward, stage.backward_input, stage.backward_weight})
      check_time(time);
}

class Simulation {
 public:
  Simulation(const Schedule& schedule, const SimulatedTimes& times)
      : schedule_(schedule),
        times_(times),
        micro_batches_(static_cast<std::size_t>(schedule.num_micro_batches)),
        activations_(schedule.rank_of_stage.size() * micro_batches_),
        gradients_(activations_.size()),
        clocks_(schedule.actions.size()) {
    timeline_.ranks.resize(schedule.actions.size());
  }

  Timeline run() {
    std::vector<std::size_t> next(schedule_.actions.size());
    for (bool any = true; any;) {
      any = false;
      for (std::size_t rank = 0; rank < next.size(); ++rank) {
        const auto& actions = schedule_.actions[rank];
        for (; next[rank] < actions.size() && take(rank, actions[next[rank]]); ++next[rank])
          any = true;
      }
    }
    for (std::size_t rank = 0; rank < next.size(); ++rank)
      LOCKSTEP_CHECK(next[rank] == schedule_.actions[rank].size(), "rank {} stopped", rank);
    return std::move(timeline_);
  }

 private:
  // A message from stage to stage, seen from the stage that needs it.
  struct Input {
    std::optional<double> one_end_started;
    std::optional<double> there;
  };

  Input& input(std::vector<Input>& inputs, int stage, int micro_batch) {
    return inputs[static_cast<std::size_t>(stage) * micro_batches_ +
                  static_cast<std::size_t>(micro_batch)];
  }
  const StageTimes& times_of(int stage) const {
    return times_.stages[times_.stages.size() == 1 ? 0 : static_cast<std::size_t>(stage)];
  }

  // Takes one action of a rank's list. False where its input is not there yet.
  bool take(std::size_t rank, const Action& action) {
    if (is_transfer(action.kind)) {
      start_transfer(rank, action);
      return true;
    }
    const int stage = action.stage;
    const int i = action.micro_batch;
    const bool forward = action.kind == ActionKind::forward;
    const bool weight = action.kind == ActionKind::backward_weight;
    double start = clocks_[rank];
    const bool has_input = forward ? stage > 0 : !weight && stage + 1 < schedule_.num_stages();
    if (has_input) {
      const Input& needed = input(forward ? activations_ : gradients_, stage, i);
      if (!needed.there) return false;
      start = std::max(start, *needed.there);
    }
    const double end = start + duration(action);
    clocks_[rank] = end;
    timeline_.ranks[rank].push_back({start, end, action});
    // A stage on this rank has the result at once; to others it is sent.
    const int after = forward ? stage + 1 : stage - 1;
    if (!weight && after >= 0 && after < schedule_.num_stages() &&
        !is_sent(schedule_, stage, after))
      input(forward ? activations_ : gradients_, after, i).there = end;
    return true;
  }

  double duration(const Action& action) const {
    const StageTimes& times = times_of(action.stage);
    switch (action.kind) {
      case ActionKind::forward: return times.forward;
      case ActionKind::backward: return times.backward_input + times.backward_weight;
      case ActionKind::backward_input: return times.backward_input;
      default: return times.backward_weight;
    }
  }

  void start_transfer(std::size_t rank, const Action& action) {
    const Action receive = is_receive(action.kind) ? action : other_end(action);
    const bool activation = receive.kind == ActionKind::receive_activation;
    Input& arriving =
        input(activation ? activations_ : gradients_, receive.stage, receive.micro_batch);
    if (!arriving.one_end_started) {
      arriving.one_end_started = clocks_[rank];
      return;
    }
    // Both ends of the transfers before it in the channel have started, too.
    const Action send = other_end(receive);
    double& channel = channels_[{schedule_.rank_of_stage[static_cast<std::size_t>(send.stage)],
                                 schedule_.rank_of_stage[static_cast<std::size_t>(receive.stage)]}];
    channel = std::max({channel, clocks_[rank], *arriving.one_end_started}) + times_.transfer;
    arriving.there = channel;
  }

  const Schedule& schedule_;
  const SimulatedTimes& times_;
  std::size_t micro_batches_;
  std::vector<Input> activations_;
  std::vector<Input> gradients_;
  std::vector<double> clocks_;                      // when each rank is free
  std::map<std::pair<int, int>, double> channels_;  // when each is free
  Timeline timeline_;
};

}  // namespace

Timeline simulate(const Schedule& schedule, const SimulatedTimes& times) {
  check(schedule);
  check_times(schedule, times);
  return Simulation(schedule, times).run();
}

}  // namespace lockstep::pipeline
