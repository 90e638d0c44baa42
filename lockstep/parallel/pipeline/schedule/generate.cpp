#include <lockstep/parallel/pipeline/schedule/generate.h>

#include <algorithm>
#include <cstdint>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>
#include <lockstep/parallel/pipeline/schedule/orders.h>
#include <lockstep/parallel/pipeline/schedule/transfers.h>

namespace lockstep::pipeline {

namespace {

constexpr std::array<std::string_view, kScheduleKinds.size()> kNames = {
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"};

// Stages times micro-batches: more would take gigabytes to write down.
constexpr std::int64_t kMostForwards = 1 << 22;

int chunks_of(ScheduleKind kind, int asked_for) {
  const bool several = kind == ScheduleKind::interleaved;
  const int own = several || kind == ScheduleKind::zb_v ? 2 : 1;
  if (asked_for == 0) return own;
  if (asked_for != own && !several)
    throw UsageError("{} has {} chunk{} a rank, and {} were asked for: leave their number out, or "
                     "choose interleaved",
                     name_of(kind), own, own == 1 ? "" : "s", asked_for);
  return asked_for;
}

void check_size(const ScheduleSize& size, int num_chunks) {
  const auto at_least_one = [](int number, const char* what) {
    if (number < 1) throw UsageError("a pipeline has {} {}: at least 1 is needed", number, what);
  };
  at_least_one(size.num_ranks, "ranks");
  at_least_one(size.num_micro_batches, "micro-batches");
  at_least_one(num_chunks, "chunks a rank");
  // Each product fits once the one before it is known to be small.
  const std::int64_t stages = std::int64_t{size.num_ranks} * num_chunks;
  if (stages > kMostForwards || stages * size.num_micro_batches > kMostForwards)
    throw UsageError("a schedule of {} stages and {} micro-batches would have more than {} "
                     "forwards: choose fewer",
                     stages, size.num_micro_batches, kMostForwards);
}

std::vector<int> stages_in_turn(int num_ranks, int num_chunks) {
  std::vector<int> ranks;
  for (int stage = 0; stage < num_ranks * num_chunks; ++stage) ranks.push_back(stage % num_ranks);
  return ranks;
}

std::vector<int> stages_in_a_v(int num_ranks) {
  std::vector<int> ranks;
  for (int stage = 0; stage < 2 * num_ranks; ++stage)
    ranks.push_back(stage < num_ranks ? stage : 2 * num_ranks - 1 - stage);
  return ranks;
}

Order order_of(ScheduleKind kind, int ranks, int micro_batches, int chunks) {
  switch (kind) {
    case ScheduleKind::gpipe: return gpipe_order(ranks, micro_batches);
    case ScheduleKind::one_forward_one_backward: break;
    case ScheduleKind::interleaved:
      // One chunk is 1F1B, which holds less.
      if (chunks == 1) break;
      return interleaved_order(ranks, micro_batches, chunks);
    case ScheduleKind::zb_h1:
      return with_weights(
          one_forward_one_backward_order(ranks, micro_batches, ActionKind::backward_input),
          static_cast<std::size_t>(ranks), micro_batches, ranks);
    case ScheduleKind::zb_v:
      return with_weights(v_shaped_order(ranks, micro_batches), 2 * static_cast<std::size_t>(ranks),
                          micro_batches, 2 * ranks);
  }
  return one_forward_one_backward_order(ranks, micro_batches, ActionKind::backward);
}

}  // namespace

std::string_view name_of(ScheduleKind kind) { return kNames.at(static_cast<std::size_t>(kind)); }

ScheduleKind schedule_kind_named(std::string_view name) {
  for (const ScheduleKind kind : kScheduleKinds)
    if (name_of(kind) == name) return kind;
  throw UsageError("'{}' is no kind of schedule{}: choose one of {}", name,
                   did_you_mean(name, kNames), fmt::join(kNames, ", "));
}

Schedule make_schedule(ScheduleKind kind, const ScheduleSize& size) {
  const int chunks = chunks_of(kind, size.num_chunks);
  check_size(size, chunks);
  Schedule schedule;
  schedule.name = name_of(kind);
  schedule.num_micro_batches = size.num_micro_batches;
  schedule.rank_of_stage = kind == ScheduleKind::zb_v ? stages_in_a_v(size.num_ranks)
                                                      : stages_in_turn(size.num_ranks, chunks);
  schedule.actions = order_of(kind, size.num_ranks, size.num_micro_batches, chunks);
  return with_transfers(schedule);
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
