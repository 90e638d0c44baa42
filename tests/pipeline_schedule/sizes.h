// The schedules that the tests run through.
#pragma once

#include <functional>
#include <vector>

#include <lockstep/parallel/pipeline/schedule/registry.h>

namespace lockstep::pipeline::testing {

#ifdef LOCKSTEP_SANITIZED
inline const std::vector<int> kRanks = {1, 2, 3, 4, 7, 8, 16};
inline const std::vector<int> kMicroBatches = {1, 2, 3, 5, 8, 13, 16, 33};
#else
inline std::vector<int> up_to(int last) {
  std::vector<int> numbers;
  for (int i = 1; i <= last; ++i) numbers.push_back(i);
  return numbers;
}
inline const std::vector<int> kRanks = up_to(16);
inline const std::vector<int> kMicroBatches = up_to(64);
#endif

// Lockstep's own kinds, without those that tests register.
inline const std::vector<ScheduleKind> own_kinds = schedule_kinds();

// Visits each of them, with up to 4 chunks if it has a choice.
inline void for_each_size(const std::function<void(ScheduleKind, const ScheduleSize&)>& look) {
  for (const ScheduleKind kind : own_kinds)
    for (const int ranks : kRanks)
      for (const int micro_batches : kMicroBatches)
        for (int chunks = 1; chunks <= (kind == ScheduleKind::interleaved ? 4 : 1); ++chunks)
          look(kind, {.num_ranks = ranks,
                      .num_micro_batches = micro_batches,
                      .num_chunks = kind == ScheduleKind::interleaved ? chunks : 0});
}

}  // namespace lockstep::pipeline::testing
