// Finds ranks that run but make no progress, because they are stopped or stuck.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/rank_side/progress_page.h>

namespace lockstep::launch {

// A process as /proc shows it.
struct ProcessState {
  char letter = '?';  // '?' where there is no such process
  pid_t parent = -1;
  unsigned flags = 0;  // the kernel's, for the first thread

  // Stopped by SIGSTOP or a terminal. A process that a debugger holds is not.
  bool stopped() const { return letter == 'T'; }
  // On its way out. Its parent hears of that only when all of its threads have ended, which on a
  // busy machine takes a while.
  bool ending() const;
};
ProcessState state_of(pid_t pid);

// Looks at the ranks of one host from time to time. Borrows the page; not thread-safe.
class RankWatch {
 public:
  // A rank that is stopped for this long is told of; a shorter stop may have been meant so.
  static constexpr milliseconds kStoppedFor{2000};
  static constexpr milliseconds kBetweenLooks{250};

  struct Finding {
    enum class Kind { stopped, goes_on, stuck };
    Kind kind = Kind::stopped;
    int local_rank = 0;
    std::uint64_t step = 0;     // where a stuck rank was last
    milliseconds still_for{0};  // how long a stuck rank has been there
  };

  // A rank is stuck where it has reported progress and then none for `stuck_after`; zero: never.
  RankWatch(int num_ranks, const ProgressPage& page, milliseconds stuck_after);

  // Findings since the last look; none where that was a moment ago. `pids` by local rank, 0 for
  // ranks that do not run. Each stop is found once. Stuck ranks are found at every look, the one
  // that is furthest behind first.
  std::vector<Finding> look(const std::vector<int>& pids, Clock::time_point now);

  // Call this when ranks that were stopped on purpose go on: none of that time counts.
  void resume(Clock::time_point now);

 private:
  struct Watched {
    std::optional<Clock::time_point> stopped_since;
    bool told = false;  // that it is stopped
    std::optional<std::uint64_t> step;
    Clock::time_point moved;  // when the step changed last
  };

  const ProgressPage& page_;
  const milliseconds stuck_after_;
  std::vector<Watched> ranks_;
  Clock::time_point next_look_;
};

}  // namespace lockstep::launch
