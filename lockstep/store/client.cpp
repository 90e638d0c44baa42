#include <lockstep/store/client.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>
#include <lockstep/store/protocol.h>

namespace lockstep::store {

namespace {

// Connections that are kept for later calls. A burst of waiting threads makes more and closes them
// afterwards.
constexpr std::size_t kMostIdle = 4;

// How long after the deadline to wait for the server's own "timeout", which names the missing keys.
constexpr milliseconds kLastWord(1000);

constexpr std::size_t kMostKeysListed = 16;

std::string random_name() {
  std::array<std::byte, 16> bytes;
  net::fill_random(bytes);
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<int>(byte));
  return text;
}

std::string describe(const Request& request) {
  return request.keys.size() == 1
             ? fmt::format("store {} '{}'", name(request.op), request.keys.front())
             : fmt::format("store {} of {} keys", name(request.op), request.keys.size());
}

std::string list_keys(const std::vector<std::string>& keys) {
  std::string text;
  for (std::size_t i = 0; i < std::min(keys.size(), kMostKeysListed); ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", keys[i]);
  if (keys.size() > kMostKeysListed)
    text += fmt::format(" and {} more", keys.size() - kMostKeysListed);
  return text;
}

std::string only_value(Reply& reply) {
  LOCKSTEP_CHECK(reply.values.size() == 1, "a reply with {} values", reply.values.size());
  return std::move(reply.values.front());
}

void check_sizes(const Request& request) {
  if (request.keys.size() > kMostKeysInWait)
    throw UsageError("{}: at most {} keys can be waited for at once: wait in several calls",
                     describe(request), kMostKeysInWait);
  std::size_t key_bytes = 0;
  for (const std::string& key : request.keys) {
    key_bytes += key.size() + sizeof(std::uint32_t);
    if (key.size() > kLongestKey)
      throw UsageError("store {}: a key of {} bytes ('{}…') is over the limit of {}: shorten it",
                       name(request.op), key.size(), key.substr(0, 40), kLongestKey);
  }
  if (key_bytes > kLongestRequest - 1024)
    throw UsageError("{}: the keys have {} bytes together, over the limit of {}: wait in several "
                     "calls",
                     describe(request), key_bytes, kLongestRequest - 1024);
  const auto value_bytes =
      std::max(request.value.size(), request.expected ? request.expected->size() : 0);
  if (request.op != Op::wait && value_bytes > kLongestValue)
    throw UsageError("{}: a value of {} bytes is over the limit of {}: the store is for addresses "
                     "and small state, send large data through a communicator or a file",
                     describe(request), value_bytes, kLongestValue);
}

}  // namespace

class Client::Impl {
 public:
  Impl(net::Address address, net::Secret secret, const Deadline& deadline, std::uint32_t generation,
       net::IfRefused if_refused)
      : address_(std::move(address)),
        secret_(std::move(secret)),
        generation_(generation),
        purpose_(purpose_of(random_name(), generation)) {
    idle_.push_back(connect(deadline, if_refused));
  }

  // Sends a request and returns the reply. CommError names the call and the server; UsageError
  // if the server refuses the request.
  Reply call(Request request, const Deadline& deadline);

 private:
  // Gives a call its number until the call ends, whether it returns or throws.
  class Turn;

  Reply ask(Request& request, const Deadline& deadline);
  Reply exchange(const net::Fd& socket, const Request& request, const Deadline& deadline);
  net::Fd connect(const Deadline& deadline, net::IfRefused if_refused);
  void check_greeting(const Greeting& greeting);
  net::Fd take_idle();
  void put_back(net::Fd socket);

  const net::Address address_;
  const net::Secret secret_;
  const std::uint32_t generation_;
  const std::string purpose_;

  std::mutex mutex_;  // guards the members below
  std::vector<net::Fd> idle_;
  std::optional<Greeting> greeting_;
  std::uint64_t next_number_ = 1;
  std::set<std::uint64_t> open_;
};

class Client::Impl::Turn {
 public:
  explicit Turn(Impl& impl) : impl_(impl) {
    const std::lock_guard lock(impl_.mutex_);
    number_ = impl_.next_number_++;
    impl_.open_.insert(number_);
  }
  ~Turn() {
    const std::lock_guard lock(impl_.mutex_);
    impl_.open_.erase(number_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  std::uint64_t number() const { return number_; }
  std::uint64_t lowest_open() const {
    const std::lock_guard lock(impl_.mutex_);
    return *impl_.open_.begin();
  }

 private:
  Impl& impl_;
  std::uint64_t number_ = 0;
};

Reply Client::Impl::call(Request request, const Deadline& deadline) {
  check_sizes(request);
  Reply reply;
  try {
    reply = ask(request, deadline);
  } catch (const CommError& error) {
    throw CommError({.fault = error.fault(),
                     .operation = describe(request),
                     .explanation = fmt::format("The store is at {}. {}", address_.text(),
                                                error.details().explanation)});
  }
  switch (reply.status) {
    case Status::ok:
    case Status::absent:
    case Status::different: return reply;
    case Status::timeout:
      throw CommError(
          {.fault = Fault::timeout,
           .operation = describe(request),
           .explanation = request.op == Op::wait
                              ? fmt::format("Missing after {:.1f} s: {}.", deadline.span_seconds(),
                                            list_keys(reply.values))
                              : fmt::format("Nobody set it within {:.1f} s (seen: version {}).",
                                            deadline.span_seconds(), request.seen)});
    case Status::full:
      throw UsageError("{}: the store is full ({} bytes are held): remove keys that are no longer "
                       "needed, or keep large data elsewhere",
                       describe(request), reply.number);
    case Status::not_number:
      throw UsageError("{}: the key holds '{}', which is not a decimal counter", describe(request),
                       reply.values.empty() ? std::string() : reply.values.front().substr(0, 40));
    case Status::overflow:
      throw UsageError("{}: {} and {} do not add up to a 64-bit number", describe(request),
                       reply.number, request.amount);
    case Status::too_large:
      throw UsageError("{}: the values have {} bytes together, over the limit of {}: wait in "
                       "several calls",
                       describe(request), reply.number, kMostValueBytes);
  }
  LOCKSTEP_CHECK(false, "no such status");
}

Reply Client::Impl::ask(Request& request, const Deadline& deadline) {
  const Turn turn(*this);
  request.number = turn.number();
  milliseconds pause(1);
  while (true) {
    net::Fd socket = take_idle();
    const bool was_idle = static_cast<bool>(socket);
    if (!was_idle) socket = connect(deadline, net::IfRefused::give_up);
    request.answered = turn.lowest_open();
    try {
      Reply reply = exchange(socket, request, deadline);
      put_back(std::move(socket));
      return reply;
    } catch (const CommError& error) {
      if (error.fault() != Fault::peer_lost || deadline.passed()) throw;
    }
    if (was_idle) continue;  // an idle connection may have broken long ago
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline.remaining()));
    pause = std::min(pause * 2, milliseconds(100));
  }
}

Reply Client::Impl::exchange(const net::Fd& socket, const Request& request,
                             const Deadline& deadline) {
  Deadline answer_by = deadline;
  Request timed = request;
  if (request.op == Op::wait || request.op == Op::watch) {
    timed.patience_ms =
        static_cast<std::uint64_t>(std::chrono::ceil<milliseconds>(deadline.remaining()).count());
    answer_by = Deadline::after(deadline.remaining() + kLastWord);
  }
  net::write_all(socket, encode(timed), deadline);
  std::array<std::byte, kSizeBytes> front;
  net::read_all(socket, front, answer_by);
  std::optional<Reply> reply;
  if (const auto size = parse_size(front, kLongestReply)) {
    std::vector<std::byte> body(*size);
    net::read_all(socket, body, answer_by);
    reply = parse_reply(body);
  }
  if (!reply)
    throw CommError({.fault = Fault::corrupted,
                     .operation = "read",
                     .explanation = "Its reply is not of this protocol: do both sides run the same "
                                    "version of Lockstep?"});
  return std::move(*reply);
}

net::Fd Client::Impl::connect(const Deadline& deadline, net::IfRefused if_refused) {
  milliseconds pause(5);
  while (true) {
    net::Fd socket = net::connect_tcp(address_, deadline, if_refused);
    net::set_keep_alive(socket);
    const auto attempt =
        Deadline::after(std::min<Clock::duration>(kHandshakeTime, deadline.remaining()));
    Greeting greeting;
    try {
      net::introduce(socket, secret_, purpose_, attempt);
      net::read_all(socket, greeting, attempt);
    } catch (const CommError& error) {
      // A server with too many newcomers sheds connections, genuine ones too, so the client tries
      // again.
      const bool shed = error.fault() == Fault::peer_lost || error.fault() == Fault::timeout;
      if (!shed || deadline.passed()) throw;
      std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline.remaining()));
      pause = std::min(pause * 2, milliseconds(100));
      continue;
    }
    check_greeting(greeting);
    return socket;
  }
}

void Client::Impl::check_greeting(const Greeting& greeting) {
  if (generation_in(greeting) != generation_)
    throw CommError(
        {.fault = Fault::refused,
         .operation = "connect",
         .explanation = fmt::format(
             "It serves generation {} of the job, and this process is of generation {}: "
             "the job has been formed anew without it, and it cannot take part.",
             generation_in(greeting), generation_)});
  const std::lock_guard lock(mutex_);
  if (!greeting_) greeting_ = greeting;
  if (*greeting_ != greeting)
    throw CommError({.fault = Fault::peer_lost,
                     .operation = "connect",
                     .explanation = "Another server answers there now: the one that held this "
                                    "job's keys has ended."});
}

net::Fd Client::Impl::take_idle() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return {};
  net::Fd socket = std::move(idle_.back());
  idle_.pop_back();
  return socket;
}

void Client::Impl::put_back(net::Fd socket) {
  const std::lock_guard lock(mutex_);
  if (idle_.size() < kMostIdle) idle_.push_back(std::move(socket));
}

Client::Client(net::Address address, net::Secret secret, Deadline deadline,
               std::uint32_t generation, net::IfRefused if_refused)
    : impl_(std::make_unique<Impl>(std::move(address), std::move(secret), deadline, generation,
                                   if_refused)) {}

Client::~Client() = default;

void Client::set(const std::string& key, const std::string& value, Deadline deadline) {
  impl_->call({.op = Op::set, .keys = {key}, .value = value}, deadline);
}

std::optional<std::string> Client::get(const std::string& key, Deadline deadline) {
  Reply reply = impl_->call({.op = Op::get, .keys = {key}}, deadline);
  if (reply.status == Status::absent) return std::nullopt;
  return only_value(reply);
}

std::vector<std::string> Client::wait(const std::vector<std::string>& keys, Deadline deadline) {
  return impl_->call({.op = Op::wait, .keys = keys}, deadline).values;
}

std::string Client::compare_and_set(const std::string& key,
                                    const std::optional<std::string>& expected,
                                    const std::string& desired, Deadline deadline) {
  Reply reply = impl_->call(
      {.op = Op::compare_and_set, .keys = {key}, .value = desired, .expected = expected}, deadline);
  if (reply.status == Status::ok) return desired;
  return reply.values.empty() ? std::string() : std::move(reply.values.front());
}

std::int64_t Client::add(const std::string& key, std::int64_t amount, Deadline deadline) {
  return impl_->call({.op = Op::add, .keys = {key}, .amount = amount}, deadline).number;
}

Versioned Client::watch(const std::string& key, std::uint64_t seen, Deadline deadline) {
  Reply reply = impl_->call({.op = Op::watch, .keys = {key}, .seen = seen}, deadline);
  return {only_value(reply), static_cast<std::uint64_t>(reply.number)};
}

bool Client::remove(const std::string& key, Deadline deadline) {
  return impl_->call({.op = Op::remove, .keys = {key}}, deadline).number != 0;
}

}  // namespace lockstep::store
