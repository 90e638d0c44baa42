// Connections between launchers: lines of text over an authenticated socket, how a launcher
// connects to the leader of its job, and where it listens for the others.
#pragma once

#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/rendezvous/messages.h>
#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/secret.h>

namespace lockstep::launch {

inline constexpr const char* kLauncherPurpose = "lockstep launcher";

// A message is a word and a text, neither with a newline. Owns its socket; not thread-safe. Never
// throws: a connection that breaks, or whose peer sends nonsense, is closed.
class Connection {
 public:
  struct Message {
    std::string word;
    std::string text;
  };

  static constexpr std::size_t kLongestMessage = 1 << 20;

  Connection() = default;
  explicit Connection(net::Fd socket) : socket_(std::move(socket)) {}

  bool open() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.get(); }

  // Messages are few and small: a peer that does not take one within half a second is as good as
  // gone, and the connection is closed.
  void send(const std::string& word, const std::string& text = "");

  // The next message that has arrived, or nothing. What arrived before the connection closed is
  // still delivered.
  std::optional<Message> receive();

  // Waits for one; returns nothing at the deadline or when the connection is closed.
  std::optional<Message> receive(const Deadline& deadline);

  // When bytes last arrived.
  Clock::time_point last_heard() const { return last_heard_; }

  void close() { socket_.reset(); }

 private:
  void read_available();

  net::Fd socket_;
  std::string buffer_;
  Clock::time_point last_heard_ = Clock::now();
};

// The result of one attempt to join the job at an address.
struct Attempt {
  enum class Outcome {
    accepted,     // the leader is there, and the connection stays open
    redirected,   // a launcher of the job is there, and says where the leader is
    not_ready,    // a launcher is there, but it is of no job yet, or is busy
    stranger,     // something listens there that is no launcher
    unreachable,  // nobody listens there, or it cannot be reached
  };
  Outcome outcome = Outcome::unreachable;
  Connection connection;
  net::Address leader;  // set where it was accepted or redirected
  // Why it was unreachable or a stranger. For not_ready, the word that the launcher answered;
  // empty where it is busy.
  std::string reason;
};

// Connects once and introduces this launcher. CommError (refused) where the one who listens does
// not know the job's secret, or refuses this launcher and says why.
Attempt try_to_join(const net::Address& address, const Introduction& introduction,
                    const net::Secret& secret, const Deadline& deadline);

// The same, but follows a redirection. Each of the two attempts may take `longest`, and neither
// goes on beyond the deadline.
Attempt try_to_follow(const net::Address& address, const Introduction& introduction,
                      const net::Secret& secret, milliseconds longest,
                      const Deadline& deadline = Deadline::never());

// Tries one address after the other until the leader is found or the deadline has passed
// (CommError: timeout).
Attempt find_leader(const std::vector<net::Address>& addresses, const Introduction& introduction,
                    const net::Secret& secret, const Deadline& deadline);

// A launcher that has connected, proven that it knows the secret, and introduced itself.
struct Arrival {
  Connection connection;
  Introduction introduction;
};

// Where a launcher listens for the other launchers of its job.
//
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

  // The address that it listens on, with the port that it got.
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
