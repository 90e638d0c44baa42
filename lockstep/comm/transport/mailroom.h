// What a process knows of its groups, and where connections wait for theirs.
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

// How a group is doing at one of its ranks.
struct GroupState {
  bool open = false;
  std::uint64_t sequence = 0;    // of its newest call
  std::optional<Notice> notice;  // why it is over, where it failed
};

// Sorts connections by group. A group's id is used once: a group that is over stays over, and who
// connects to it is turned away, while connections of groups that this process has yet to open are
// kept. Thread-safe. Everything in it is bounded: peers have proven that they are of this job, not
// that they are free of mistakes.
class Mailroom {
 public:
  struct Limits {
    // Groups that failed: told to who asks, which peers do within moments.
    std::size_t most_failed = 64;
    // Groups left in good order, remembered so that they are not taken for groups yet to come.
    std::size_t most_left = 1024;
    // A rank is late for one group per thread of its own that opens groups, but each group may
    // have thousands of ranks.
    std::size_t most_early_groups = 64;
    std::size_t most_early_connections = 16384;
    // How long a connection is kept whose other end has hung up: a peer may have done its part and
    // left before this rank comes. One that is still held at the other end is kept for as long as
    // it is: that rank waits for us, with a deadline of its own.
    milliseconds hung_up_time{600'000};
  };

  Mailroom() : Mailroom(Limits{}) {}
  explicit Mailroom(Limits limits) : limits_(limits) {}

  // Opens a group's mailbox; the group is open while the pointer lives.
  std::shared_ptr<Mailbox> open(const std::string& group_id);

  // The group has failed here.
  void close(const std::string& group_id, const Notice& notice);

  GroupState state(const std::string& group_id) const;

  // A connection of rank `from`; closed at once where the group is over. Past the limits the oldest
  // of those that wait for a group are closed. UsageError where a mailbox cannot be made.
  void deliver(const std::string& group_id, int from, net::Fd connection,
               Clock::time_point now = Clock::now());

  // Closes what has waited for its group too long; false where nothing waits.
  bool sweep(Clock::time_point now = Clock::now());

 private:
  struct Early {
    std::string group_id;
    std::shared_ptr<Mailbox> mailbox;
    Clock::time_point since;  // the newest connection came
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
  // All of them oldest first.
  std::deque<std::string> left_;
  std::deque<Failed> failed_;
  std::deque<Early> early_;
};

}  // namespace lockstep::comm
