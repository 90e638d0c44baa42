#include <lockstep/parallel/pipeline/schedule/registry.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <mutex>
#include <span>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>

namespace lockstep::pipeline {

namespace {

// `ahead` forwards, then a backward and a forward in turn, then the backwards that are left.
std::vector<Action> by_turns(std::span<const Action> forwards, std::span<const Action> backwards,
                             std::size_t ahead) {
  ahead = std::min(ahead, forwards.size());
  std::vector<Action> actions(forwards.begin(), forwards.begin() + static_cast<long>(ahead));
  for (std::size_t i = 0; i < backwards.size(); ++i) {
    actions.push_back(backwards[i]);
    if (ahead + i < forwards.size()) actions.push_back(forwards[ahead + i]);
  }
  return actions;
}

std::vector<Action> each_micro_batch(ActionKind kind, int stage, int num_micro_batches) {
  std::vector<Action> actions;
  for (int i = 0; i < num_micro_batches; ++i) actions.push_back({kind, stage, i});
  return actions;
}

// Micro-batches go through the chunks in rounds. A round has at least as many as there are ranks,
// so that the first is back at the first rank when the last has left it. Rounds have nearly the
// same size, the larger ones first.
std::vector<int> round_sizes(int num_ranks, int num_micro_batches) {
  const int rounds = std::max(1, num_micro_batches / num_ranks);
  std::vector<int> sizes;
  for (int i = 0; i < rounds; ++i)
    sizes.push_back(num_micro_batches / rounds + (i < num_micro_batches % rounds ? 1 : 0));
  return sizes;
}

// The actions of a rank in ZB-V. The list is made for at least as many micro-batches as fill the
// pipeline; micro-batches that the step does not have are left out.
class VShapedRank {
 public:
  VShapedRank(int num_ranks, int rank, int num_micro_batches)
      : down_{.stage = rank}, up_{.stage = 2 * num_ranks - 1 - rank}, most_(num_micro_batches) {
    const int made_for = std::max(num_micro_batches, 2 * num_ranks - 1);
    // The forwards that start before the first micro-batch is back on its way up.
    for (int i = 0; i < 2 * (num_ranks - rank) - 1; ++i) forward(down_);
    for (int i = 0; i < rank; ++i) {
      forward(up_);
      forward(down_);
    }
    // Then the first backwards, which come from the top.
    for (int i = 0; i < num_ranks - rank; ++i) {
      forward(up_);
      backward(up_);
    }
    for (int i = 0; i < made_for - num_ranks; ++i) {
      forward(down_);
      backward(down_);
      forward(up_);
      backward(up_);
    }
    for (int i = 0; i < rank; ++i) {
      backward(down_);
      backward(up_);
    }
    for (int i = 0; i < num_ranks - rank; ++i) backward(down_);
  }

  std::vector<Action> take() { return std::move(actions_); }

 private:
  struct Chunk {
    int stage;
    int forwards = 0;
    int backwards = 0;
  };

  void forward(Chunk& chunk) { add(ActionKind::forward, chunk.stage, chunk.forwards++); }
  void backward(Chunk& chunk) { add(ActionKind::backward_input, chunk.stage, chunk.backwards++); }
  void add(ActionKind kind, int stage, int micro_batch) {
    if (micro_batch < most_) actions_.push_back({kind, stage, micro_batch});
  }

  Chunk down_;
  Chunk up_;
  int most_;
  std::vector<Action> actions_;
};

// All forwards, then all backwards, on a stage for each rank.
Order gpipe_order(const ScheduleSize& size) {
  Order order;
  for (int rank = 0; rank < size.num_ranks; ++rank) {
    const auto backwards = each_micro_batch(ActionKind::backward, rank, size.num_micro_batches);
    order.push_back(by_turns(each_micro_batch(ActionKind::forward, rank, size.num_micro_batches),
                             backwards, backwards.size()));
  }
  return order;
}

// Each rank runs as few forwards ahead of their backwards as keep the last stage busy. `backward`
// is the kind: the whole of it, or the input's.
Order one_forward_one_backward_order(const ScheduleSize& size, ActionKind backward) {
  Order order;
  for (int rank = 0; rank < size.num_ranks; ++rank)
    order.push_back(by_turns(each_micro_batch(ActionKind::forward, rank, size.num_micro_batches),
                             each_micro_batch(backward, rank, size.num_micro_batches),
                             static_cast<std::size_t>(size.num_ranks - rank)));
  return order;
}

// 1F1B with several stages a rank, stage s on rank s % num_ranks.
Order interleaved_order(const ScheduleSize& size) {
  const auto [num_ranks, num_micro_batches, num_chunks] = size;
  const auto sizes = round_sizes(num_ranks, num_micro_batches);
  Order order;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::vector<Action> forwards;
    std::vector<Action> backwards;
    int first = 0;
    for (const int round : sizes) {
      for (int chunk = 0; chunk < num_chunks; ++chunk)
        for (int i = first; i < first + round; ++i) {
          const int last = num_chunks - 1 - chunk;
          forwards.push_back({ActionKind::forward, chunk * num_ranks + rank, i});
          backwards.push_back({ActionKind::backward, last * num_ranks + rank, i});
        }
      first += round;
    }
    // The forwards that start before the first micro-batch is back from all later stages: two for
    // each later rank, and a round for each chunk but the last.
    const int ahead = (num_chunks - 1) * sizes.front() + 2 * (num_ranks - 1 - rank) + 1;
    order.push_back(by_turns(forwards, backwards, static_cast<std::size_t>(ahead)));
  }
  return order;
}

// Forwards and inputs' backwards of ZB-V, two stages a rank: s and 2 num_ranks - 1 - s.
Order v_shaped_order(const ScheduleSize& size) {
  Order order;
  for (int rank = 0; rank < size.num_ranks; ++rank)
    order.push_back(VShapedRank(size.num_ranks, rank, size.num_micro_batches).take());
  return order;
}

// Runs an order in steps of one action a rank, and does the weights' backwards on the way.
class StepByStep {
 public:
  StepByStep(const Order& order, const ScheduleSize& size)
      : order_(order),
        num_stages_(size.num_ranks * size.num_chunks),
        num_micro_batches_(static_cast<std::size_t>(size.num_micro_batches)),
        forward_done_(static_cast<std::size_t>(num_stages_) * num_micro_batches_, kNever),
        input_done_(forward_done_),
        ranks_(order.size()),
        result_(order.size()) {}

  Order run() {
    bool left = true;
    for (int now = 0; left; ++now) {
      left = false;
      bool any = false;
      for (std::size_t rank = 0; rank < order_.size(); ++rank) {
        any |= step(rank, now);
        left |= ranks_[rank].next < order_[rank].size() || !ranks_[rank].weights.empty();
      }
      LOCKSTEP_CHECK(any || !left, "no rank can go on at step {}", now);
    }
    return std::move(result_);
  }

 private:
  struct Rank {
    std::size_t next = 0;
    int live = 0;
    std::deque<Action> weights;  // backwards that are left to do
  };
  static constexpr int kNever = std::numeric_limits<int>::max();

  std::size_t index(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * num_micro_batches_ +
           static_cast<std::size_t>(micro_batch);
  }

  bool is_ready(const Action& action, int now) const {
    const int stage = action.stage;
    if (action.kind == ActionKind::forward)
      return stage == 0 || forward_done_[index(stage - 1, action.micro_batch)] <= now;
    return forward_done_[index(stage, action.micro_batch)] <= now &&
           (stage == num_stages_ - 1 || input_done_[index(stage + 1, action.micro_batch)] <= now);
  }

  bool step(std::size_t at, int now) {
    Rank& rank = ranks_[at];
    if (rank.next < order_[at].size()) {
      const Action& action = order_[at][rank.next];
      const bool forward = action.kind == ActionKind::forward;
      if (is_ready(action, now) && !(forward && rank.live >= num_stages_)) {
        result_[at].push_back(action);
        ++rank.next;
        const std::size_t place = index(action.stage, action.micro_batch);
        if (forward) {
          ++rank.live;
          forward_done_[place] = now + 1;
        } else {
          input_done_[place] = now + 1;
          rank.weights.push_back({ActionKind::backward_weight, action.stage, action.micro_batch});
        }
        return true;
      }
    }
    if (rank.weights.empty()) return false;
    result_[at].push_back(rank.weights.front());
    rank.weights.pop_front();
    --rank.live;
    return true;
  }

  const Order& order_;
  int num_stages_;
  std::size_t num_micro_batches_;
  std::vector<int> forward_done_;  // the step after each
  std::vector<int> input_done_;
  std::vector<Rank> ranks_;
  Order result_;
};

// Puts a backward of the weights behind each backward of the input, as if each action took the same
// time. A rank does it while it has nothing else to do, or when a forward would make it hold more
// activations than the pipeline has stages. The gradients of a stage's weights keep the order of
// micro-batches.
Order with_weights(const Order& order, const ScheduleSize& size) {
  return StepByStep(order, size).run();
}

// Stages times micro-batches: the lists of more would take gigabytes.
constexpr std::int64_t kMostForwards = 1 << 22;

void check_size(const ScheduleSize& size) {
  const auto at_least_one = [](int number, const char* what) {
    if (number < 1) throw UsageError("a pipeline has {} {}: at least 1 is needed", number, what);
  };
  at_least_one(size.num_ranks, "ranks");
  at_least_one(size.num_micro_batches, "micro-batches");
  at_least_one(size.num_chunks, "chunks a rank");
  // Each product fits once the one before it is known to be small.
  const std::int64_t stages = std::int64_t{size.num_ranks} * size.num_chunks;
  if (stages > kMostForwards || stages * size.num_micro_batches > kMostForwards)
    throw UsageError("a schedule of {} stages and {} micro-batches would have more than {} "
                     "forwards: choose fewer",
                     stages, size.num_micro_batches, kMostForwards);
}

std::vector<int> stages_in_turn(const ScheduleSize& size) {
  std::vector<int> ranks;
  for (int stage = 0; stage < size.num_ranks * size.num_chunks; ++stage)
    ranks.push_back(stage % size.num_ranks);
  return ranks;
}

std::vector<int> stages_in_a_v(const ScheduleSize& size) {
  std::vector<int> ranks;
  for (int stage = 0; stage < 2 * size.num_ranks; ++stage)
    ranks.push_back(stage < size.num_ranks ? stage : 2 * size.num_ranks - 1 - stage);
  return ranks;
}

// Lockstep's own rows, in the order of the enumerators.
std::deque<ScheduleDefinition> own_definitions() {
  return {
      {.name = "gpipe", .order = gpipe_order},
      {.name = "1f1b",
       .order =
           [](const ScheduleSize& size) {
             return one_forward_one_backward_order(size, ActionKind::backward);
           }},
      {.name = "interleaved",
       .num_chunks = 2,
       .has_free_chunks = true,
       .order =
           [](const ScheduleSize& size) {
             // One chunk is 1F1B, which holds fewer activations.
             return size.num_chunks == 1
                        ? one_forward_one_backward_order(size, ActionKind::backward)
                        : interleaved_order(size);
           }},
      {.name = "zb-h1",
       .order =
           [](const ScheduleSize& size) {
             return with_weights(one_forward_one_backward_order(size, ActionKind::backward_input),
                                 size);
           }},
      {.name = "zb-v",
       .num_chunks = 2,
       .rank_of_stage = stages_in_a_v,
       .order = [](const ScheduleSize& size) { return with_weights(v_shaped_order(size), size); }}};
}

// There is one for the process. Rows are added, never moved or removed.
struct Registry {
  std::mutex mutex;
  std::deque<ScheduleDefinition> definitions = own_definitions();
  const std::size_t num_own = definitions.size();

  static Registry& instance() {
    static Registry registry;
    return registry;
  }
};

bool is_name(std::string_view name) {
  return !name.empty() && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
}

std::vector<std::string_view> names() {
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  std::vector<std::string_view> names;
  for (const ScheduleDefinition& definition : registry.definitions)
    names.push_back(definition.name);
  return names;
}

// The size with its chunks filled in.
ScheduleSize complete(const ScheduleDefinition& definition, ScheduleSize size) {
  const int own = definition.num_chunks;
  if (size.num_chunks == 0) size.num_chunks = own;
  if (size.num_chunks != own && !definition.has_free_chunks)
    throw UsageError("{} has {} chunk{} a rank, and {} were asked for: leave their number out, or "
                     "choose interleaved",
                     definition.name, own, own == 1 ? "" : "s", size.num_chunks);
  check_size(size);
  return size;
}

}  // namespace

ScheduleKind register_schedule(ScheduleDefinition definition) {
  if (!is_name(definition.name))
    throw UsageError("a schedule cannot be called '{}': a name has lower-case letters, digits, - "
                     "and _ only",
                     definition.name);
  if (definition.num_chunks < 1)
    throw UsageError("the schedule {} has {} stages a rank: at least 1 is needed", definition.name,
                     definition.num_chunks);
  if (!definition.order)
    throw UsageError("the schedule {} has no order: give a function that makes one",
                     definition.name);
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  auto& definitions = registry.definitions;
  if (std::ranges::find(definitions, definition.name, &ScheduleDefinition::name) !=
      definitions.end())
    throw UsageError("there is a schedule called {} already: choose another name", definition.name);
  definitions.push_back(std::move(definition));
  return static_cast<ScheduleKind>(definitions.size() - 1);
}

std::vector<ScheduleKind> schedule_kinds() {
  std::vector<ScheduleKind> kinds;
  for (std::size_t i = 0; i < names().size(); ++i) kinds.push_back(static_cast<ScheduleKind>(i));
  return kinds;
}

const ScheduleDefinition& definition_of(ScheduleKind kind) {
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  return registry.definitions.at(static_cast<std::size_t>(kind));
}

std::string_view name_of(ScheduleKind kind) { return definition_of(kind).name; }

ScheduleKind schedule_kind_named(std::string_view name) {
  const auto all = names();
  const auto found = std::ranges::find(all, name);
  if (found == all.end())
    throw UsageError("'{}' is no kind of schedule{}: choose one of {}", name,
                     did_you_mean(name, all), fmt::join(all, ", "));
  return static_cast<ScheduleKind>(found - all.begin());
}

Schedule make_schedule(ScheduleKind kind, const ScheduleSize& asked) {
  const ScheduleDefinition& definition = definition_of(kind);
  const ScheduleSize size = complete(definition, asked);
  const auto& rank_of_stage = definition.rank_of_stage;
  const Schedule computing = {
      .name = definition.name,
      .num_micro_batches = size.num_micro_batches,
      .rank_of_stage = rank_of_stage ? rank_of_stage(size) : stages_in_turn(size),
      .actions = definition.order(size)};
  // Lockstep's own rows are proved by their tests.
  if (static_cast<std::size_t>(kind) < Registry::instance().num_own)
    return with_transfers(computing);
  try {
    if (computing.num_ranks() != size.num_ranks)
      throw UsageError("its order has {} ranks, and {} were asked for", computing.num_ranks(),
                       size.num_ranks);
    check_places(computing);
    Schedule schedule = with_transfers(computing);
    check(schedule);
    return schedule;
  } catch (const UsageError& error) {
    throw UsageError("the schedule {} for {} ranks and {} micro-batches: {}", definition.name,
                     size.num_ranks, size.num_micro_batches, error.what());
  }
}

Schedule one_micro_batch(const std::vector<int>& rank_of_stage) {
  if (rank_of_stage.empty()) throw UsageError("a pipeline has no stages: at least 1 is needed");
  const int num_stages = static_cast<int>(rank_of_stage.size());
  Schedule schedule{.name = "one micro-batch",
                    .num_micro_batches = 1,
                    .rank_of_stage = rank_of_stage,
                    .actions = {}};
  schedule.actions.resize(
      static_cast<std::size_t>(*std::max_element(rank_of_stage.begin(), rank_of_stage.end())) + 1);
  const auto add = [&](ActionKind kind, int stage) {
    const int rank = rank_of_stage[static_cast<std::size_t>(stage)];
    schedule.actions[static_cast<std::size_t>(rank)].push_back(
        {.kind = kind, .stage = stage, .micro_batch = 0});
  };
  for (int stage = 0; stage < num_stages; ++stage) add(ActionKind::forward, stage);
  for (int stage = num_stages - 1; stage >= 0; --stage) add(ActionKind::backward, stage);
  return with_transfers(schedule);
}

}  // namespace lockstep::pipeline
