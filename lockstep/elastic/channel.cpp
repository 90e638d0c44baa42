#include <lockstep/elastic/channel.h>

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <span>

#include <lockstep/base/error.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

namespace {

constexpr milliseconds kPatience(500);

}  // namespace

Channel::Channel(net::Fd socket) : socket_(std::move(socket)) {}

void Channel::send(const std::string& word, const std::string& text) {
  if (!socket_) return;
  const std::string line = word + " " + text + "\n";
  LOCKSTEP_CHECK(line.size() <= kLongestMessage && line.find('\n') == line.size() - 1);
  try {
    net::write_all(socket_, std::as_bytes(std::span(line)), Deadline::after(kPatience));
  } catch (const CommError&) {
    close();
  }
}

void Channel::read_available() {
  std::array<char, 4096> bytes;
  while (socket_) {
    const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      buffer_.append(bytes.data(), static_cast<std::size_t>(got));
      last_heard_ = Clock::now();
      if (buffer_.size() > kLongestMessage) return;
    } else if (got < 0 && errno == EAGAIN) {
      return;
    } else if (got == 0 || errno != EINTR) {
      close();
    }
  }
}

std::optional<Channel::Message> Channel::receive() {
  if (buffer_.find('\n') == std::string::npos) read_available();
  const auto end = buffer_.find('\n');
  if (end == std::string::npos) {
    if (buffer_.size() > kLongestMessage) close();
    return std::nullopt;
  }
  const auto space = std::min(buffer_.find(' '), end);
  Message message{buffer_.substr(0, space), buffer_.substr(space, end - space)};
  if (!message.text.empty()) message.text.erase(0, 1);
  buffer_.erase(0, end + 1);
  return message;
}

std::optional<Channel::Message> Channel::receive(const Deadline& deadline) {
  while (true) {
    if (auto message = receive()) return message;
    if (!socket_ || !net::wait_ready(socket_.get(), POLLIN, deadline)) return std::nullopt;
  }
}

}  // namespace lockstep::elastic
