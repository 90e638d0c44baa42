#include <lockstep/launch/rendezvous/connection.h>

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
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

namespace {

constexpr std::size_t kMostCandidates = 256;
constexpr milliseconds kLongestProof(3000);
constexpr milliseconds kPauseWithoutDescriptors(100);
// Launchers with another secret may try again as often as they like: the log tells of one of them
// in this time.
constexpr milliseconds kQuiet(10'000);

void set(const net::Fd& event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event.get(), &one, sizeof(one));
}

}  // namespace

Listener::Listener(const net::Address& address, const net::Secret& secret)
    : secret_(secret),
      socket_(net::listen_tcp(address)),
      address_{address.host, net::local_port(socket_)},
      event_(net::make_event()),
      stop_(net::make_event()),
      quiet_until_(Clock::now()),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

Listener::~Listener() {
  thread_.request_stop();
  set(stop_);
}

std::vector<Arrival> Listener::arrivals() {
  const std::lock_guard lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof(count));
  return std::exchange(arrived_, {});
}

void Listener::turn_away(const std::string& word, const std::string& text) {
  const std::lock_guard lock(mutex_);
  answer_ = word;
  answer_text_ = text;
}

void Listener::run(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}, {socket_.get(), POLLIN, 0}};
    int timeout = -1;
    for (const Candidate& candidate : candidates_)
      polled.push_back(
          {candidate.connection ? candidate.connection->fd() : candidate.socket.get(), POLLIN, 0});
    if (!candidates_.empty())
      timeout = Deadline(candidates_.front().since + kLongestProof).poll_timeout();
    if (::poll(polled.data(), polled.size(), timeout) < 0) continue;
    std::size_t index = 2;
    for (auto candidate = candidates_.begin(); candidate != candidates_.end(); ++index) {
      Progress progress = Progress::waits;
      try {
        if (polled[index].revents != 0) progress = read_from(*candidate);
      } catch (const std::exception& error) {
        log::debug("a connection was dropped: {}", error.what());
        progress = Progress::gone;
      }
      const bool late = Clock::now() - candidate->since > kLongestProof;
      candidate =
          progress != Progress::waits || late ? candidates_.erase(candidate) : std::next(candidate);
    }
    if (polled[1].revents != 0) accept();
  }
}

void Listener::accept() {
  while (net::Fd socket = net::accept(socket_)) {
    if (candidates_.size() >= kMostCandidates) candidates_.pop_front();
    std::string host = net::peer_address(socket).host;
    candidates_.push_back({std::move(socket), std::move(host), net::Acceptor(secret_)});
  }
  if (net::out_of_descriptors(errno)) std::this_thread::sleep_for(kPauseWithoutDescriptors);
}

Listener::Progress Listener::read_from(Candidate& candidate) {
  std::array<std::byte, net::kLongestPurpose> bytes;
  while (!candidate.connection) {
    const std::size_t wanted = std::min(bytes.size(), candidate.acceptor.wanted());
    const ssize_t got = ::recv(candidate.socket.get(), bytes.data(), wanted, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Progress::waits;
    if (got <= 0) {
      // A launcher with another secret notices that in our answer, and closes the connection.
      tell_of_wrong_secret(candidate);
      return Progress::gone;
    }
    // An answer fits into any socket's buffer, unless the peer has filled it with something else.
    const auto answer =
        candidate.acceptor.take(std::span(bytes).first(static_cast<std::size_t>(got)));
    if (!answer.empty() &&
        ::send(candidate.socket.get(), answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL) !=
            static_cast<ssize_t>(answer.size()))
      return Progress::gone;
    if (candidate.acceptor.state() == net::Acceptor::State::refused) {
      tell_of_wrong_secret(candidate);
      return Progress::gone;
    }
    if (candidate.acceptor.state() != net::Acceptor::State::welcomed) continue;
    if (candidate.acceptor.purpose() != kLauncherPurpose) return Progress::gone;
    candidate.connection.emplace(std::move(candidate.socket));
  }
  const auto hello = candidate.connection->receive();
  if (!hello) return candidate.connection->open() ? Progress::waits : Progress::gone;
  if (hello->word != "hello") return Progress::gone;
  admit({std::move(*candidate.connection), Introduction::decode(hello->text)});
  return Progress::introduced;
}

void Listener::tell_of_wrong_secret(const Candidate& candidate) {
  if (candidate.acceptor.purpose() != kLauncherPurpose || Clock::now() < quiet_until_) return;
  quiet_until_ = Clock::now() + kQuiet;
  log::warn("a launcher at {} did not prove that it knows this job's secret, and was not let in: "
            "give the same --secret-file (or LOCKSTEP_SECRET_FILE) on every host",
            candidate.host);
}

void Listener::admit(Arrival arrival) {
  const std::lock_guard lock(mutex_);
  if (!answer_.empty()) {
    arrival.connection.send(answer_, answer_text_);
    return;
  }
  arrived_.push_back(std::move(arrival));
  set(event_);
}

}  // namespace lockstep::launch
