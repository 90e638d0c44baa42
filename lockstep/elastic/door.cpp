#include <lockstep/elastic/door.h>

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

namespace {

constexpr std::size_t kMostCallers = 256;
constexpr milliseconds kLongestProof(3000);
constexpr milliseconds kPauseWithoutDescriptors(100);
// Between two words about visitors with another secret: they can come as often as they like.
constexpr milliseconds kQuiet(10'000);

void ring(const net::Fd& event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event.get(), &one, sizeof(one));
}

}  // namespace

Door::Door(const net::Address& address, const net::Secret& secret)
    : secret_(secret),
      listener_(net::listen_tcp(address)),
      address_{address.host, net::local_port(listener_)},
      event_(net::make_event()),
      stop_(net::make_event()),
      quiet_until_(Clock::now()),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

Door::~Door() {
  thread_.request_stop();
  ring(stop_);
}

std::vector<Arrival> Door::arrivals() {
  const std::lock_guard lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof(count));
  return std::exchange(arrived_, {});
}

void Door::send_away(const std::string& word, const std::string& text) {
  const std::lock_guard lock(mutex_);
  word_ = word;
  text_ = text;
}

void Door::run(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    int timeout = -1;
    for (const Caller& caller : callers_)
      polled.push_back({caller.channel ? caller.channel->fd() : caller.socket.get(), POLLIN, 0});
    if (!callers_.empty())
      timeout = Deadline(callers_.front().since + kLongestProof).poll_timeout();
    if (::poll(polled.data(), polled.size(), timeout) < 0) continue;
    std::size_t index = 2;
    for (auto caller = callers_.begin(); caller != callers_.end(); ++index) {
      Progress progress = Progress::waits;
      try {
        if (polled[index].revents != 0) progress = attend(*caller);
      } catch (const std::exception& error) {
        log::debug("a connection was dropped: {}", error.what());
        progress = Progress::gone;
      }
      const bool late = Clock::now() - caller->since > kLongestProof;
      caller = progress != Progress::waits || late ? callers_.erase(caller) : std::next(caller);
    }
    if (polled[1].revents != 0) accept();
  }
}

void Door::accept() {
  while (net::Fd socket = net::accept(listener_)) {
    if (callers_.size() >= kMostCallers) callers_.pop_front();
    std::string host = net::peer_address(socket).host;
    callers_.push_back({std::move(socket), std::move(host), net::Acceptor(secret_)});
  }
  if (net::out_of_descriptors(errno)) std::this_thread::sleep_for(kPauseWithoutDescriptors);
}

Door::Progress Door::attend(Caller& caller) {
  std::array<std::byte, net::kLongestPurpose> bytes;
  while (!caller.channel) {
    const std::size_t wanted = std::min(bytes.size(), caller.acceptor.wanted());
    const ssize_t got = ::recv(caller.socket.get(), bytes.data(), wanted, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Progress::waits;
    if (got <= 0) {
      // Whoever has another secret sees that from our answer, and hangs up.
      tell_of_wrong_secret(caller);
      return Progress::gone;
    }
    // Answers are shorter than any buffer: who does not take one has filled it with something else.
    const auto answer = caller.acceptor.take(std::span(bytes).first(static_cast<std::size_t>(got)));
    if (!answer.empty() &&
        ::send(caller.socket.get(), answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL) !=
            static_cast<ssize_t>(answer.size()))
      return Progress::gone;
    if (caller.acceptor.state() == net::Acceptor::State::refused) {
      tell_of_wrong_secret(caller);
      return Progress::gone;
    }
    if (caller.acceptor.state() != net::Acceptor::State::welcomed) continue;
    if (caller.acceptor.purpose() != kLauncherPurpose) return Progress::gone;
    caller.channel.emplace(std::move(caller.socket));
  }
  const auto hello = caller.channel->receive();
  if (!hello) return caller.channel->open() ? Progress::waits : Progress::gone;
  if (hello->word != "hello") return Progress::gone;
  admit({std::move(*caller.channel), Introduction::decode(hello->text)});
  return Progress::came_in;
}

void Door::tell_of_wrong_secret(const Caller& caller) {
  if (caller.acceptor.purpose() != kLauncherPurpose || Clock::now() < quiet_until_) return;
  quiet_until_ = Clock::now() + kQuiet;
  log::warn("a launcher at {} did not prove that it knows this job's secret, and was not let in: "
            "give the same --secret-file (or LOCKSTEP_SECRET_FILE) on every host",
            caller.host);
}

void Door::admit(Arrival arrival) {
  const std::lock_guard lock(mutex_);
  if (!word_.empty()) {
    arrival.channel.send(word_, text_);
    return;
  }
  arrived_.push_back(std::move(arrival));
  ring(event_);
}

}  // namespace lockstep::elastic
