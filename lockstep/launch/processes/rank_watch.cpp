#include <lockstep/launch/processes/rank_watch.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include <lockstep/net/fd.h>

namespace lockstep::launch {

ProcessState state_of(pid_t pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  const net::Fd file(::open(path, O_RDONLY | O_CLOEXEC));
  char text[512];
  const ssize_t size = file ? ::read(file.get(), text, sizeof(text) - 1) : -1;
  ProcessState state;
  if (size <= 0) return state;
  text[size] = '\0';
  // "123 (name, which may hold anything) S 45 45 45 0 -1 4194560 ..."
  if (const char* const name_end = std::strrchr(text, ')'))
    std::sscanf(name_end, ") %c %d %*d %*d %*d %*d %u", &state.letter, &state.parent, &state.flags);
  return state;
}

bool ProcessState::ending() const {
  constexpr unsigned kExiting = 0x4;  // PF_EXITING
  return letter == 'Z' || letter == 'X' || (flags & kExiting) != 0;
}

RankWatch::RankWatch(int num_ranks, const ProgressPage& page, milliseconds stuck_after)
    : page_(page),
      stuck_after_(stuck_after),
      ranks_(static_cast<std::size_t>(num_ranks)),
      next_look_(Clock::now()) {}

void RankWatch::resume(Clock::time_point now) {
  next_look_ = now + kBetweenLooks;
  for (Watched& rank : ranks_) {
    rank.stopped_since.reset();
    rank.moved = now;
  }
}

std::vector<RankWatch::Finding> RankWatch::look(const std::vector<int>& pids,
                                                Clock::time_point now) {
  std::vector<Finding> found;
  if (now < next_look_) return found;
  next_look_ = now + kBetweenLooks;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Watched& rank = ranks_[i];
    const auto local_rank = static_cast<int>(i);
    if (pids[i] == 0) continue;
    if (state_of(pids[i]).stopped()) {
      if (!rank.stopped_since) rank.stopped_since = now;
      if (!rank.told && now - *rank.stopped_since >= kStoppedFor) {
        rank.told = true;
        found.push_back({Finding::Kind::stopped, local_rank});
      }
    } else {
      rank.stopped_since.reset();
      if (std::exchange(rank.told, false)) found.push_back({Finding::Kind::goes_on, local_rank});
    }
    const auto step = page_.step(local_rank);
    if (step != rank.step) {
      rank.step = step;
      rank.moved = now;
    }
  }
  const auto stops = static_cast<std::ptrdiff_t>(found.size());
  for (std::size_t i = 0; i < ranks_.size() && stuck_after_ > stuck_after_.zero(); ++i) {
    const Watched& rank = ranks_[i];
    if (pids[i] == 0 || !rank.step || now - rank.moved < stuck_after_) continue;
    found.push_back({Finding::Kind::stuck, static_cast<int>(i), *rank.step,
                     std::chrono::duration_cast<milliseconds>(now - rank.moved)});
  }
  std::stable_sort(found.begin() + stops, found.end(), [](const Finding& a, const Finding& b) {
    return a.step != b.step ? a.step < b.step : a.still_for > b.still_for;
  });
  return found;
}

}  // namespace lockstep::launch
