// Messages between two launchers: lines of text over an authenticated connection.
#pragma once

#include <optional>
#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/net/fd.h>

namespace lockstep::elastic {

// A message is a word and a text, neither with a newline. Owns its socket; not thread-safe. Never
// throws: a connection that breaks, or a peer that sends nonsense, is closed.
class Channel {
 public:
  struct Message {
    std::string word;
    std::string text;
  };

  static constexpr std::size_t kLongestMessage = 1 << 20;

  Channel() = default;
  explicit Channel(net::Fd socket);

  bool open() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.get(); }

  // Messages are few and small: a peer that does not take one within half a second is as good as
  // gone, and the connection is closed.
  void send(const std::string& word, const std::string& text = "");

  // The next message that has arrived; nothing where there is none yet. What arrived before the
  // connection closed is still delivered.
  std::optional<Message> receive();

  // Waits for one; nothing at the deadline or when the connection is closed.
  std::optional<Message> receive(const Deadline& deadline);

  // When anything last arrived.
  Clock::time_point last_heard() const { return last_heard_; }

  void close() { socket_.reset(); }

 private:
  void read_available();

  net::Fd socket_;
  std::string buffer_;
  Clock::time_point last_heard_ = Clock::now();
};

}  // namespace lockstep::elastic
