// The place where the other processes of a job reach this process, for all groups that it is in.
// The mailroom has a mailbox for each group, where connections wait for it; the endpoint fills the
// mailboxes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/transport/link.h>
#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/secret.h>

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
    // Failed groups are remembered, because peers ask for the reason within moments.
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

  // Stores a connection of rank `from`, or closes it at once if the group is over. Beyond the
  // limits it closes the oldest connections that wait for a group. UsageError if a mailbox cannot
  // be made.
  void deliver(const std::string& group_id, int from, net::Fd connection,
               Clock::time_point now = Clock::now());

  // Closes connections that have waited too long for their group; false if none waits.
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

// The medium of a connection.
enum class Medium : std::uint8_t { shared_memory, tcp };

// Listens on a Unix socket and on a TCP address; a thread greets each new connection and sorts it
// by group. A connection that does not prove within two seconds that it knows the secret is
// dropped. Owned by the job; outlives every group.
class Endpoint {
 public:
  // `bind_host` is the TCP address to listen on; the system chooses the port.
  Endpoint(const std::string& bind_host, net::Secret secret);
  ~Endpoint();

  const EndpointAddress& address() const { return address_; }
  const net::Secret& secret() const { return secret_; }

  // Opens a group's mailbox. The group is open while the pointer lives.
  std::shared_ptr<Mailbox> open(const std::string& group_id) { return mailroom_.open(group_id); }

  // Connects to another endpoint's mailbox for a group, as rank `from` of it; tries again if the
  // connection is dropped while it is greeted. CommError (peer_lost) if nobody listens there any
  // more.
  net::Fd connect(const EndpointAddress& to, const std::string& group_id, int from, Medium medium,
                  Deadline deadline) const;
  // Asks another endpoint, over a fresh TCP connection to it, for the state of a group there.
  using Answer = GroupState;
  Answer ask(const net::Fd& connection, const std::string& group_id, Deadline deadline) const;

  // Asks another endpoint's rank a question, and returns the answer of the function that it has set
  // with set_answers(). CommError if it does not answer, or has set none.
  std::string inquire(const EndpointAddress& to, const std::string& question,
                      Deadline deadline) const;
  // Sets the function that answers such questions here. The endpoint's thread calls it, so it must
  // not block. After set_answers(nullptr) has returned, it is not called any more.
  using Answers = std::function<std::string(const std::string& question)>;
  void set_answers(Answers answers);

  // Notes that the group has failed here: ranks that ask are told why.
  void close(const std::string& group_id, const Notice& notice) {
    mailroom_.close(group_id, notice);
  }

 private:
  struct Greeting;
  struct Reception;

  void serve();
  bool serve(Reception& reception);
  void accept_from(const net::Fd& listener, Reception& reception);
  bool advance(Greeting& greeting);
  void deliver(const std::string& purpose, net::Fd connection);
  void answer(const std::string& group_id, const net::Fd& connection);
  void answer_inquiry(const std::string& question, const net::Fd& connection);

  net::Secret secret_;
  EndpointAddress address_;
  net::Fd unix_listener_;
  net::Fd tcp_listener_;
  net::Fd stop_event_;
  Mailroom mailroom_;
  std::mutex answers_mutex_;
  Answers answers_;
  std::thread thread_;
};

}  // namespace lockstep::comm
