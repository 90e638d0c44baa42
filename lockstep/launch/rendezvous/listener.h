// Where a launcher listens for the other launchers of its job.
#pragma once

#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/rendezvous/connection.h>
#include <lockstep/net/handshake.h>

namespace lockstep::launch {

// A launcher that has connected, proven that it knows the secret, and introduced itself.
struct Arrival {
  Connection connection;
  Introduction introduction;
};

// Owns its listening socket and a thread, which both end with it. A connection that does not prove
// within a few seconds that it knows the job's secret, and introduce itself, is dropped; where too
// many of them are open, the oldest goes first, so that silent strangers hold up nobody. Now and
// then the log tells of launchers that were dropped because of another secret. Thread-safe.
class Listener {
 public:
  // Listens on exactly `address`; UsageError where that cannot be.
  Listener(const net::Address& address, const net::Secret& secret);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // With the port it got.
  const net::Address& address() const { return address_; }

  // Readable while there are arrivals.
  int fd() const { return event_.get(); }

  // The launchers that have arrived since the last call, in order.
  std::vector<Arrival> arrivals();

  // From now on each arrival gets this answer and is dropped.
  void turn_away(const std::string& word, const std::string& text = "");
  // From now on arrivals are let in, as they are at first.
  void let_in() { turn_away(""); }

 private:
  // A connection whose peer has not introduced itself yet.
  struct Candidate {
    net::Fd socket;
    std::string host;
    net::Acceptor acceptor;
    Clock::time_point since = Clock::now();
    std::optional<Connection> connection;  // once it has proven that it knows the secret
  };
  enum class Progress { waits, gone, introduced };

  void run(const std::stop_token& stop);
  void accept();
  Progress read_from(Candidate& candidate);
  void tell_of_wrong_secret(const Candidate& candidate);
  void admit(Arrival arrival);

  const net::Secret secret_;
  const net::Fd socket_;
  const net::Address address_;
  const net::Fd event_;
  const net::Fd stop_;

  std::mutex mutex_;  // guards the next three
  std::vector<Arrival> arrived_;
  std::string answer_, answer_text_;  // for those to turn away; empty: nobody is

  // Only the thread uses these.
  std::list<Candidate> candidates_;  // oldest first
  Clock::time_point quiet_until_;    // no word about wrong secrets before
  std::jthread thread_;
};

}  // namespace lockstep::launch
