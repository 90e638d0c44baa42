// The contents of a store, and the requests that wait for a key: everything but the sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/store/protocol.h>

namespace lockstep::store {

// Keeps a change from being made twice if a client sends its request again after a broken
// connection. Remembers, for each client, the results of the calls that it may still repeat.
// Bounded: past kMostClients the client that has been silent longest is forgotten, past kMostCalls
// a client's oldest call. Not thread-safe.
class Repeats {
 public:
  static constexpr std::size_t kMostClients = 1 << 16;
  static constexpr std::size_t kMostCalls = 1024;

  enum class Kind : std::uint8_t {
    fresh,     // not seen before: carry it out
    repeated,  // carried out before, with this result
    stale,     // the client has its answer or gave up: this came late on an old connection
  };
  struct Verdict {
    Kind kind = Kind::fresh;
    std::int64_t result = 0;
  };

  // Call this before making a change. Forgets the client's calls below `answered`.
  Verdict look_up(const std::string& client, std::uint64_t call, std::uint64_t answered);

  // Call this after making the change; the client has been looked up just before.
  void remember(const std::string& client, std::uint64_t call, std::int64_t result);

 private:
  struct Calls {
    std::uint64_t answered = 0;
    std::map<std::uint64_t, std::int64_t> results;
  };
  using Clients = std::list<std::pair<std::string, Calls>>;

  Calls& touch(const std::string& client);

  Clients clients_;  // most recently heard from first
  std::unordered_map<std::string, Clients::iterator> index_;
};

// The number of the connection that made a request. It has at most one request open.
using Ticket = std::uint64_t;

struct Answer {
  Ticket ticket = 0;
  Reply reply;
};

// Carries out requests, one at a time; the caller tells it the time. Holds at most about
// `capacity_bytes` of keys and values; a request that would exceed that is refused and changes
// nothing. Not thread-safe.
class Table {
 public:
  explicit Table(std::size_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  // Carries out a request. Appends its answer, unless the request has to wait, and the answers of
  // requests whose wait it ends. A stale repeat (Repeats) gets none.
  void apply(Ticket ticket, const std::string& client, Request request, Clock::time_point now,
             std::vector<Answer>& answers);

  // Ends the waits whose time is over.
  void expire(Clock::time_point now, std::vector<Answer>& answers);

  // Forgets a wait, if there is one.
  void cancel(Ticket ticket);

  // When expire() next has something to do.
  std::optional<Clock::time_point> next_expiry() const;

  std::size_t held_bytes() const { return held_bytes_; }
  std::size_t num_waiting() const { return waiters_.size(); }

 private:
  struct Waiter {
    Request request;
    std::size_t next = 0;  // wait: keys before this one existed at the last check
    std::string blocker;   // the one key whose change wakes it
    Clock::time_point until;
  };

  Reply change(const Request& request);
  Reply set(const std::string& key, const std::string& value);
  Reply compare_and_set(const Request& request);
  Reply add(const Request& request);
  Reply remove(const std::string& key);

  // Returns the waiter's answer if there is one; otherwise the waiter stands behind its blocker.
  std::optional<Reply> look(Waiter& waiter) const;
  std::optional<Reply> look_for_all(Waiter& waiter) const;
  Reply expired(const Waiter& waiter) const;
  void park(Ticket ticket, Waiter waiter);
  void wake(const std::string& key, std::vector<Answer>& answers);

  std::size_t capacity_bytes_;
  std::size_t held_bytes_ = 0;
  // of the whole store, so that a key that is set anew does not start over
  std::uint64_t version_ = 0;
  std::unordered_map<std::string, Versioned> entries_;
  std::unordered_map<Ticket, Waiter> waiters_;
  std::unordered_map<std::string, std::unordered_set<Ticket>> behind_;  // keyed by blocker
  std::set<std::pair<Clock::time_point, Ticket>> expiries_;
  Repeats repeats_;
};

}  // namespace lockstep::store
