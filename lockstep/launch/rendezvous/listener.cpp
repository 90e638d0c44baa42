#include <lockstep/launch/rendezvous/listener.h>

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/net/socket.h>

namespace lockstep::launch {

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
