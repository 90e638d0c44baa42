// The schedules that Lockstep knows, for any number of ranks and micro-batches.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

enum class ScheduleKind : std::uint8_t {
  gpipe,                     // all forwards, then all backwards
  one_forward_one_backward,  // 1F1B
  interleaved,               // 1F1B with several stages a rank, stage s on rank s % ranks
  zb_h1,                     // 1F1B whose weights' gradients fill the bubble, in the memory of 1F1B
  zb_v,  // two stages a rank in the shape of a V, s and 2 ranks - 1 - s; next to no bubble
};
inline constexpr std::array kScheduleKinds = {
    ScheduleKind::gpipe, ScheduleKind::one_forward_one_backward, ScheduleKind::interleaved,
    ScheduleKind::zb_h1, ScheduleKind::zb_v};

// "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v".
std::string_view name_of(ScheduleKind kind);
// UsageError with the nearest name, and all of them.
ScheduleKind schedule_kind_named(std::string_view name);

struct ScheduleSize {
  int num_ranks = 1;
  int num_micro_batches = 1;
  int num_chunks = 0;  // stages a rank; 0 is the kind's own: 2 for interleaved and zb-v, else 1
};

// Complete, with its transfers; it passes check(). There may be fewer micro-batches than stages,
// and for interleaved their number need not be a multiple of the ranks'. UsageError for a size
// below 1, one that no machine has, or chunks that the kind does not have.
Schedule make_schedule(ScheduleKind kind, const ScheduleSize& size);

// Forward and backward of one micro-batch through stages that lie on ranks as given.
Schedule one_micro_batch(const std::vector<int>& rank_of_stage);

}  // namespace lockstep::pipeline
