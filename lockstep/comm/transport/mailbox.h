// Connections that have arrived for one group, waiting to be picked up.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// Owns the connections until they are taken. Thread-safe.
class Mailbox {
 public:
  // UsageError where the process has no descriptor left for it.
  Mailbox();

  // The newest connection of a rank; waits until the deadline, then returns an empty Fd.
  net::Fd take(int from, Deadline deadline);

  // From now on only connections of these ranks are kept. Without it somebody's mistake would keep
  // event() readable for ever, since nobody takes it.
  void keep_only(const std::vector<int>& ranks);

  // Readable while something waits.
  int event() const { return event_.get(); }

  // How far this rank has got in the group: the number of its newest call, for others who ask.
  void set_sequence(std::uint64_t sequence) {
    sequence_.store(sequence, std::memory_order_relaxed);
  }
  std::uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

 private:
  friend class Mailroom;
  void put(int from, net::Fd connection);
  std::size_t num_waiting() const;
  bool all_hung_up() const;
  void lower_event_if_empty();

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<int, net::Fd> waiting_;
  std::optional<std::set<int>> kept_;  // all of them where not given
  net::Fd event_;
  std::atomic<std::uint64_t> sequence_{0};
};

}  // namespace lockstep::comm
