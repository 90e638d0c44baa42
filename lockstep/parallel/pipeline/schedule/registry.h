// The table of pipeline schedules: every kind has a row, which makes the lists of actions for any
// number of ranks and micro-batches. A program adds kinds of its own with register_schedule().
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

// Stands for a row of the table. These are Lockstep's own; register_schedule() returns others.
enum class ScheduleKind : std::uint16_t {
  gpipe,                     // all forwards, then all backwards
  one_forward_one_backward,  // 1F1B
  interleaved,               // 1F1B with several stages a rank, stage s on rank s % ranks
  zb_h1,                     // 1F1B whose weights' gradients fill the bubble, in the memory of 1F1B
  zb_v,  // two stages a rank in the shape of a V, s and 2 ranks - 1 - s; next to no bubble
};

struct ScheduleSize {
  int num_ranks = 1;
  int num_micro_batches = 1;
  int num_chunks = 0;  // stages a rank; 0 is the kind's own number
};

// For each rank the list of its actions that compute, without transfers.
using Order = std::vector<std::vector<Action>>;

// A row of the table.
struct ScheduleDefinition {
  std::string name;              // "1f1b", as configs and commands write it
  int num_chunks = 1;            // stages a rank
  bool has_free_chunks = false;  // whether a size may have another number of them
  // The rank of each stage, first to last. Without it, stage s is on rank s % num_ranks.
  std::function<std::vector<int>(const ScheduleSize& size)> rank_of_stage;
  // Has the forward of each micro-batch through each stage once, and its backward once, whole or in
  // its two halves. The size has at least 1 of each.
  std::function<Order(const ScheduleSize& size)> order;
};

// Adds a row for as long as the process lives. Every rank of a job has to register the same.
// Threading: any. UsageError where the name is taken or is not one of lower-case letters, digits, -
// and _, where num_chunks is below 1, and where there is no order.
ScheduleKind register_schedule(ScheduleDefinition definition);

// All rows, in the order in which they were added.
std::vector<ScheduleKind> schedule_kinds();
const ScheduleDefinition& definition_of(ScheduleKind kind);
std::string_view name_of(ScheduleKind kind);
// UsageError with the nearest name, and all of them.
ScheduleKind schedule_kind_named(std::string_view name);

// Makes a complete schedule, with its transfers, that passes check(). There may be fewer
// micro-batches than stages, and for interleaved their number need not be a multiple of the ranks'.
// UsageError for a size below 1, a size so large that the lists would take gigabytes, chunks that
// the kind does not have, and a registered order that check() refuses.
Schedule make_schedule(ScheduleKind kind, const ScheduleSize& size);

// Forward and backward of one micro-batch, with each stage on the rank that is given.
Schedule one_micro_batch(const std::vector<int>& rank_of_stage);

}  // namespace lockstep::pipeline
