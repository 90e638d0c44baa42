#include <lockstep/launch/rendezvous/connection.h>

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

namespace lockstep::launch {

namespace {

constexpr milliseconds kLongestSend(500);
// One attempt at one of several addresses is cut short, so that a host that is cut off does not
// hide the others.
constexpr milliseconds kOneAttempt(1500);
constexpr milliseconds kBetweenRounds(50);

}  // namespace

void Connection::send(const std::string& word, const std::string& text) {
  if (!socket_) return;
  const std::string line = word + " " + text + "\n";
  LOCKSTEP_CHECK(line.size() <= kLongestMessage && line.find('\n') == line.size() - 1);
  try {
    net::write_all(socket_, std::as_bytes(std::span(line)), Deadline::after(kLongestSend));
  } catch (const CommError&) {
    close();
  }
}

void Connection::read_available() {
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

std::optional<Connection::Message> Connection::receive() {
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

std::optional<Connection::Message> Connection::receive(const Deadline& deadline) {
  while (true) {
    if (auto message = receive()) return message;
    if (!socket_ || !net::wait_ready(socket_.get(), POLLIN, deadline)) return std::nullopt;
  }
}

Attempt try_to_join(const net::Address& address, const Introduction& introduction,
                    const net::Secret& secret, const Deadline& deadline) {
  Attempt attempt;
  try {
    int error = 0;
    net::Fd socket = net::try_connect_tcp(address, deadline, error);
    if (!socket) {
      attempt.reason = std::strerror(error);
      return attempt;
    }
    attempt.outcome = Attempt::Outcome::stranger;
    net::introduce(socket, secret, kLauncherPurpose, deadline);
    attempt.connection = Connection(std::move(socket));
  } catch (const CommError& error) {
    if (error.fault() == Fault::refused)
      fail_rendezvous(
          Fault::refused,
          fmt::format("What listens at {} does not know this job's secret: give the same "
                      "--secret-file (or LOCKSTEP_SECRET_FILE) on every host, and check "
                      "that no other job uses that address.",
                      address.text()));
    attempt.reason = error.what();
    return attempt;
  }
  attempt.connection.send("hello", introduction.encode());
  const auto answer = attempt.connection.receive(deadline);
  attempt.outcome = Attempt::Outcome::not_ready;
  if (!answer) return attempt;
  if (answer->word == "refused")
    fail_rendezvous(Fault::refused,
                    fmt::format("Node 0 at {} says: {}.", address.text(), answer->text));
  if (answer->word == "accepted") {
    attempt.outcome = Attempt::Outcome::accepted;
    attempt.leader = address;
  } else if (answer->word == "redirected") {
    attempt.outcome = Attempt::Outcome::redirected;
    attempt.leader =
        net::Address::parse(answer->text, 0, "another launcher's word where node 0 is");
  } else {
    attempt.reason = answer->word;
  }
  return attempt;
}

Attempt try_to_follow(const net::Address& address, const Introduction& introduction,
                      const net::Secret& secret, milliseconds longest, const Deadline& deadline) {
  const auto one_attempt = [&] {
    return Deadline::after(std::min<Clock::duration>(longest, deadline.remaining()));
  };
  Attempt found = try_to_join(address, introduction, secret, one_attempt());
  if (found.outcome == Attempt::Outcome::redirected)
    found = try_to_join(found.leader, introduction, secret, one_attempt());
  return found;
}

Attempt find_leader(const std::vector<net::Address>& addresses, const Introduction& introduction,
                    const net::Secret& secret, const Deadline& deadline) {
  std::string last_reason;
  while (true) {
    for (const net::Address& address : addresses) {
      Attempt found = try_to_follow(address, introduction, secret, kOneAttempt, deadline);
      if (found.outcome == Attempt::Outcome::accepted) return found;
      last_reason = found.outcome == Attempt::Outcome::not_ready
                        ? "a launcher is there, but not node 0's"
                        : found.reason;
    }
    if (deadline.passed()) {
      std::string list;
      for (const net::Address& address : addresses)
        list += (list.empty() ? "" : " or ") + address.text();
      fail_rendezvous(
          Fault::timeout,
          fmt::format("Node 0 did not answer at {} within {:.1f} s: start 'lockstep run' there "
                      "with the same --rdzv-endpoint (or --master-addr and --master-port), and "
                      "check that a firewall lets it be reached. ({})",
                      list, deadline.span_seconds(), last_reason));
    }
    std::this_thread::sleep_for(std::min<Clock::duration>(kBetweenRounds, deadline.remaining()));
  }
}

}  // namespace lockstep::launch
