// Ranks that are there but do not get on: stopped, or stuck.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/progress_page.h>

namespace lockstep::elastic {

// Whether the process is stopped, by SIGSTOP or a terminal. One that a debugger holds is not.
bool is_stopped(pid_t pid);

// Whether the process is on its way out. Its parent hears of that only when all of its threads have
// come to it, which takes those a while that have little of a busy machine's time.
bool is_ending(pid_t pid);

// Looks at the ranks of one host from time to time. Borrows the page; not thread-safe.
class RankWatch {
 public:
  // A rank that is stopped for so long is told of; shorter, it may have been meant so.
  static constexpr milliseconds kStoppedFor{2000};
  static constexpr milliseconds kBetweenLooks{250};

  struct Finding {
    enum class Kind { stopped, goes_on, stuck };
    Kind kind = Kind::stopped;
    int local_rank = 0;
    std::uint64_t step = 0;     // of stuck: where it was last
    milliseconds still_for{0};  // of stuck: since then
  };

  // A rank is stuck where it has reported progress and then none for `stuck_after`; zero: never.
  RankWatch(int num_ranks, const ProgressPage& page, milliseconds stuck_after);

  // Findings since the last look; none where that was a moment ago. `pids` by local rank, 0 for
  // those that do not run. Each stop is found once; of several stuck ranks, the one that is
  // furthest behind stands first, and they are found at every look.
  std::vector<Finding> look(const std::vector<int>& pids, Clock::time_point now);

  // Until now the ranks were stopped on purpose: none of that time counts.
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

}  // namespace lockstep::elastic
