// The groups that a process knows, and the connections that wait for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/transport/link.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// Connections that have arrived for one group, waiting to be picked up. Owns them until they are
// taken. Thread-safe.
class Mailbox {
 public:
  // Throws UsageError if the process has no descriptor left for it.
  Mailbox();

  // The newest connection of a rank; waits until the deadline, then returns an empty Fd.
  net::Fd take(int from, Deadline deadline);

  // From now on only connections of these ranks are kept. Otherwise a connection that nobody takes
  // would keep event() readable for ever.
  void keep_only(const std::vector<int>& ranks);

  // Readable while a connection waits.
  int event() const { return event_.get(); }

  // Notes the number of this rank's newest call in the group, for other ranks that ask.
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
  std::optional<std::set<int>> kept_;  // all ranks if not given
  net::Fd event_;
  std::atomic<std::uint64_t> sequence_{0};
};

// The state of a group at one of its ranks.
struct GroupState {
  bool open = false;
  std::uint64_t sequence = 0;    // number of its newest call
  std::optional<Notice> notice;  // why the group failed, if it did
};

// Sorts connections by group. A group's id is used once: a group that is over stays over, and
// connections to it are closed, while connections to groups that this process has yet to open are
// kept. Thread-safe. Everything in it is bounded: peers have proven that they belong to this job,
// not that they are free of mistakes.
class Mailroom {
 public:
  struct Limits {
    // Groups that failed are remembered, because peers ask for the reason within moments.
    std::size_t most_failed = 64;
    // Groups left in good order, remembered so that they are not taken for groups yet to come.
    std::size_t most_left = 1024;
    // A rank is late for one group per thread of its own that opens groups, but each group may
    // have thousands of ranks.
    std::size_t most_early_groups = 64;
    std::size_t most_early_connections = 16384;
    // How long a connection is kept after its other end has hung up: a peer may have done its part
    // and left before this rank comes. A connection that is still open at the other end is kept for
    // as long as that lasts, because that rank waits for us with a deadline of its own.
    milliseconds hung_up_time{600'000};
  };

  Mailroom() : Mailroom(Limits{}) {}
  explicit Mailroom(Limits limits) : limits_(limits) {}

  // Opens a group's mailbox; the group is open while the pointer lives.
  std::shared_ptr<Mailbox> open(const std::string& group_id);

  // Notes that the group has failed here.
  void close(const std::string& group_id, const Notice& notice);

  GroupState state(const std::string& group_id) const;

  // Takes a connection of rank `from`; closes it at once if the group is over. Past the limits, the
  // oldest connections that wait for a group are closed. UsageError if a mailbox cannot be made.
  void deliver(const std::string& group_id, int from, net::Fd connection,
               Clock::time_point now = Clock::now());

  // Closes connections that have waited for their group too long; false if none waits.
  bool sweep(Clock::time_point now = Clock::now());

 private:
  struct Early {
    std::string group_id;
    std::shared_ptr<Mailbox> mailbox;
    Clock::time_point since;  // when the newest connection came
  };
  struct Failed {
    std::string group_id;
    Notice notice;
  };

  bool is_over(const std::string& group_id) const;
  std::shared_ptr<Mailbox> mailbox(const std::string& group_id) const;
  void note_left();
  void bound_early();

  const Limits limits_;
  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Mailbox>> opened_;  // expired: left in good order, or failed
  // These are sorted with the oldest first.
  std::deque<std::string> left_;
  std::deque<Failed> failed_;
  std::deque<Early> early_;
};

}  // namespace lockstep::comm
