// Connections between launchers: lines of text over an authenticated socket, and how a launcher
// connects to the leader of its job.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/rendezvous/messages.h>
#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>
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

// The same, and goes where it is redirected to; each of the two attempts may take `longest`, and
// neither goes on beyond the deadline.
Attempt try_to_follow(const net::Address& address, const Introduction& introduction,
                      const net::Secret& secret, milliseconds longest,
                      const Deadline& deadline = Deadline::never());

// Tries one address after the other until the leader is found or the deadline has passed
// (CommError: timeout).
Attempt find_leader(const std::vector<net::Address>& addresses, const Introduction& introduction,
                    const net::Secret& secret, const Deadline& deadline);

}  // namespace lockstep::launch
