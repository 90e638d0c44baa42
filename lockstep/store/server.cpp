#include <lockstep/store/server.h>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>
#include <lockstep/store/protocol.h>
#include <lockstep/store/table.h>

namespace lockstep::store {

namespace {

// The most newcomers: strangers, or clients in their first milliseconds. Beyond this many the
// oldest is dropped, so that genuine clients get in however many strangers there are. A newcomer is
// safe for its first moments, so that a thousand ranks that connect at once do not push each other
// out.
constexpr std::size_t kMostNewcomers = 256;
constexpr milliseconds kGrace(50);

constexpr milliseconds kPauseWithoutDescriptors(100);
constexpr milliseconds kBetweenWarnings(10000);

constexpr Ticket kListener = 0;
constexpr Ticket kStop = 1;
constexpr Ticket kFirstConnection = 2;

net::Fd checked(int fd, const char* what) {
  if (fd < 0) throw UsageError("the store cannot start: {} failed: {}", what, std::strerror(errno));
  return net::Fd(fd);
}

}  // namespace

// One connection of the server, from a newcomer's first byte to the last reply.
//
// Owns its socket. Never blocks; not thread-safe. Memory grows with the bytes that arrive, never
// with a size that is only announced, and not past one request and one reply.
class Connection {
 public:
  Connection(net::Fd socket, const net::Secret& secret, const Greeting& greeting);

  int fd() const { return socket_.get(); }
  Clock::time_point since() const { return since_; }

  // Whether it has proven that it belongs to this job, and asks for the store.
  bool proven() const {
    return acceptor_.state() == net::Acceptor::State::welcomed &&
           acceptor_.purpose().starts_with(kPurpose);
  }

  // Identifies a client across its connections. Empty before it is proven.
  std::string client() const;

  enum class Condition : std::uint8_t {
    open,
    closed,   // by the other side
    refused,  // a stranger, or a breach of the protocol
  };

  // Reads the bytes that have arrived. A complete request appears in `request`. The client has to
  // wait for the answer by send(); bytes that it sends before that break the protocol.
  Condition receive(std::optional<Request>& request);

  // Sends the answer to the request received last.
  Condition send(const Reply& reply);

  // Writes as much of the waiting output as the socket takes.
  Condition flush();
  bool has_unsent() const { return sent_ < output_.size(); }

 private:
  Condition shake_hands();
  Condition receive_request(std::optional<Request>& request);
  // Reads bytes into `into` and returns their number: 0 if there are none for now, nothing if the
  // other side has closed.
  std::optional<std::size_t> read(std::span<std::byte> into);

  net::Fd socket_;
  Clock::time_point since_ = Clock::now();
  const Greeting& greeting_;
  net::Acceptor acceptor_;
  bool answering_ = false;  // a request was received and is not answered yet
  std::vector<std::byte> input_;
  std::vector<std::byte> output_;
  std::size_t sent_ = 0;
};

Connection::Connection(net::Fd socket, const net::Secret& secret, const Greeting& greeting)
    : socket_(std::move(socket)), greeting_(greeting), acceptor_(secret) {}

std::string Connection::client() const {
  return proven() ? acceptor_.purpose().substr(std::string_view(kPurpose).size()) : std::string();
}

Connection::Condition Connection::receive(std::optional<Request>& request) {
  if (!proven()) {
    const Condition condition = shake_hands();
    if (condition != Condition::open || !proven()) return condition;
  }
  return receive_request(request);
}

Connection::Condition Connection::shake_hands() {
  std::array<std::byte, net::kLongestPurpose> bytes;
  while (acceptor_.wanted() > 0) {
    const auto got = read(std::span(bytes).first(std::min(bytes.size(), acceptor_.wanted())));
    if (!got) return Condition::closed;
    if (*got == 0) return flush();
    const auto reply = acceptor_.take(std::span(bytes).first(*got));
    output_.insert(output_.end(), reply.begin(), reply.end());
  }
  if (!proven()) return Condition::refused;
  output_.insert(output_.end(), greeting_.begin(), greeting_.end());
  // A client of another generation learns that from the greeting, and gets nothing else.
  const bool stale = generation_in(acceptor_.purpose()) != generation_in(greeting_);
  const Condition condition = flush();
  return stale ? Condition::refused : condition;
}

Connection::Condition Connection::receive_request(std::optional<Request>& request) {
  std::array<std::byte, 64 << 10> bytes;
  while (true) {
    const auto got = read(bytes);
    if (!got) return Condition::closed;
    if (*got == 0) return Condition::open;
    if (answering_) return Condition::refused;
    input_.insert(input_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(*got));
    if (input_.size() < kSizeBytes) continue;
    const auto size = parse_size(std::span(input_).first<kSizeBytes>(), kLongestRequest);
    if (!size || input_.size() > kSizeBytes + *size) return Condition::refused;
    if (input_.size() < kSizeBytes + *size) continue;
    request = parse_request(std::span(input_).subspan(kSizeBytes));
    if (!request) return Condition::refused;
    input_ = {};
    answering_ = true;
  }
}

std::optional<std::size_t> Connection::read(std::span<std::byte> into) {
  while (true) {
    const ssize_t got = ::recv(socket_.get(), into.data(), into.size(), 0);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return 0;
    return std::nullopt;
  }
}

Connection::Condition Connection::send(const Reply& reply) {
  const auto bytes = encode(reply);
  output_.insert(output_.end(), bytes.begin(), bytes.end());
  answering_ = false;
  return flush();
}

Connection::Condition Connection::flush() {
  while (has_unsent()) {
    const ssize_t put =
        ::send(socket_.get(), output_.data() + sent_, output_.size() - sent_, MSG_NOSIGNAL);
    if (put > 0) {
      sent_ += static_cast<std::size_t>(put);
    } else if (put < 0 && errno == EAGAIN) {
      return Condition::open;
    } else if (put == 0 || errno != EINTR) {
      return Condition::closed;
    }
  }
  output_ = {};
  sent_ = 0;
  return Condition::open;
}

class Server::Impl {
 public:
  Impl(const net::Address& address, net::Secret secret, std::size_t capacity_bytes,
       std::uint32_t generation)
      : secret_(std::move(secret)),
        greeting_(make_greeting(generation)),
        table_(capacity_bytes),
        listener_(net::listen_tcp(address)),
        epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
        stop_(checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
        address_{address.host, net::local_port(listener_)} {
    observe(EPOLL_CTL_ADD, listener_.get(), EPOLLIN, kListener);
    observe(EPOLL_CTL_ADD, stop_.get(), EPOLLIN, kStop);
    thread_ = std::thread([this] { run(); });
  }

  ~Impl() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof(one));
    thread_.join();
    // The listener goes first: a client whose connection closes and that connects again must find
    // nobody listening.
    listener_.reset();
  }

  const net::Address& address() const { return address_; }

 private:
  struct Peer {
    Connection connection;
    std::optional<std::list<Ticket>::iterator> newcomer;  // set until it is proven
    std::uint32_t interest = EPOLLIN;
  };
  using Condition = Connection::Condition;

  void run();
  void observe(int action, int fd, std::uint32_t events, Ticket ticket);
  int poll_timeout(Clock::time_point now) const;

  void accept_some();
  void admit(net::Fd socket);
  Clock::time_point accepts_from() const;
  void update_listener(Clock::time_point now);

  void serve(Ticket ticket, std::uint32_t events);
  void settle(Ticket ticket, Condition condition);
  void deliver();
  void drop(Ticket ticket);
  void drop_silent(Clock::time_point now);
  void warn_of_strangers(Clock::time_point now);

  const net::Secret secret_;
  const Greeting greeting_;
  Table table_;
  net::Fd listener_;
  net::Fd epoll_;
  net::Fd stop_;
  const net::Address address_;

  // Only the thread uses these.
  bool accepting_ = true;
  Clock::time_point no_descriptors_until_{};
  Ticket next_ticket_ = kFirstConnection;
  std::unordered_map<Ticket, Peer> peers_;
  std::list<Ticket> newcomers_;  // oldest first
  std::vector<Answer> answers_;
  std::uint64_t num_strangers_ = 0;  // since the last warning
  Clock::time_point next_warning_{};

  std::thread thread_;
};

void Server::Impl::run() {
  std::array<epoll_event, 256> events;
  while (true) {
    const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                   poll_timeout(Clock::now()));
    for (int i = 0; i < ready; ++i) {
      const Ticket ticket = events[static_cast<std::size_t>(i)].data.u64;
      if (ticket == kStop) return;
      try {
        if (ticket == kListener) {
          accept_some();
        } else {
          serve(ticket, events[static_cast<std::size_t>(i)].events);
        }
      } catch (const std::exception& error) {
        // Out of memory, most likely: one client loses its connection, the others go on.
        log::error("the store drops a connection: {}", error.what());
        if (peers_.contains(ticket)) drop(ticket);
      }
    }
    try {
      const auto now = Clock::now();
      table_.expire(now, answers_);
      deliver();
      drop_silent(now);
      update_listener(now);
      warn_of_strangers(now);
    } catch (const std::exception& error) {
      log::error("the store cannot keep its house: {}", error.what());
    }
  }
}

void Server::Impl::observe(int action, int fd, std::uint32_t events, Ticket ticket) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = ticket;
  const int status = ::epoll_ctl(epoll_.get(), action, fd, &event);
  LOCKSTEP_CHECK(status == 0, "epoll_ctl: {}", std::strerror(errno));
}

int Server::Impl::poll_timeout(Clock::time_point now) const {
  auto next = now + std::chrono::hours(1);
  if (const auto expiry = table_.next_expiry()) next = std::min(next, *expiry);
  if (!newcomers_.empty())
    next = std::min(next, peers_.at(newcomers_.front()).connection.since() + kHandshakeTime);
  if (!accepting_) next = std::min(next, accepts_from());
  const auto left = std::chrono::ceil<milliseconds>(std::max(next - now, Clock::duration::zero()));
  return static_cast<int>(left.count());
}

void Server::Impl::accept_some() {
  // Accepts a limited number in one turn, because clients that are inside have to be served as
  // well.
  for (std::size_t i = 0; i < 64 && Clock::now() >= accepts_from(); ++i) {
    net::Fd socket = net::accept(listener_);
    if (socket) {
      admit(std::move(socket));
    } else if (net::out_of_descriptors(errno)) {
      log::warn("the store cannot take another connection ({}): raise the limit with 'ulimit -n'",
                std::strerror(errno));
      no_descriptors_until_ = Clock::now() + kPauseWithoutDescriptors;
      if (!newcomers_.empty()) drop(newcomers_.front());
    } else if (errno != ECONNABORTED && errno != EINTR) {
      return;
    }
  }
}

void Server::Impl::admit(net::Fd socket) {
  if (newcomers_.size() >= kMostNewcomers) drop(newcomers_.front());
  net::set_keep_alive(socket);
  const Ticket ticket = next_ticket_++;
  observe(EPOLL_CTL_ADD, socket.get(), EPOLLIN, ticket);
  peers_.emplace(ticket, Peer{Connection(std::move(socket), secret_, greeting_),
                              newcomers_.insert(newcomers_.end(), ticket)});
}

Clock::time_point Server::Impl::accepts_from() const {
  auto from = no_descriptors_until_;
  if (newcomers_.size() >= kMostNewcomers)
    from = std::max(from, peers_.at(newcomers_.front()).connection.since() + kGrace);
  return from;
}

void Server::Impl::update_listener(Clock::time_point now) {
  const bool accepting = now >= accepts_from();
  if (accepting == accepting_) return;
  observe(EPOLL_CTL_MOD, listener_.get(), accepting ? EPOLLIN : 0u, kListener);
  accepting_ = accepting;
}

void Server::Impl::serve(Ticket ticket, std::uint32_t events) {
  const auto found = peers_.find(ticket);
  if (found == peers_.end()) return;  // dropped earlier in this turn
  Connection& connection = found->second.connection;
  Condition condition = Condition::open;
  if ((events & EPOLLOUT) != 0) condition = connection.flush();
  std::optional<Request> request;
  if (condition == Condition::open && (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0)
    condition = connection.receive(request);
  if (condition == Condition::open && request)
    table_.apply(ticket, connection.client(), std::move(*request), Clock::now(), answers_);
  settle(ticket, condition);
  deliver();
}

void Server::Impl::settle(Ticket ticket, Condition condition) {
  Peer& peer = peers_.at(ticket);
  if (condition != Condition::open) {
    drop(ticket);
    return;
  }
  if (peer.newcomer && peer.connection.proven()) {
    newcomers_.erase(*peer.newcomer);
    peer.newcomer.reset();
  }
  const std::uint32_t interest = peer.connection.has_unsent() ? EPOLLIN | EPOLLOUT : EPOLLIN;
  if (interest == peer.interest) return;
  observe(EPOLL_CTL_MOD, peer.connection.fd(), interest, ticket);
  peer.interest = interest;
}

// A client that cannot be answered loses its connection and asks again, so that the others still
// get their answers.
void Server::Impl::deliver() {
  for (const Answer& answer : std::exchange(answers_, {})) {
    const auto found = peers_.find(answer.ticket);
    if (found == peers_.end()) continue;
    try {
      settle(answer.ticket, found->second.connection.send(answer.reply));
    } catch (const std::exception& error) {
      log::error("the store drops a connection: {}", error.what());
      if (peers_.contains(answer.ticket)) drop(answer.ticket);
    }
  }
}

void Server::Impl::drop(Ticket ticket) {
  const auto found = peers_.find(ticket);
  if (found->second.newcomer) {
    newcomers_.erase(*found->second.newcomer);
    if (!found->second.connection.proven()) ++num_strangers_;
  }
  table_.cancel(ticket);
  peers_.erase(found);
}

void Server::Impl::drop_silent(Clock::time_point now) {
  while (!newcomers_.empty() &&
         peers_.at(newcomers_.front()).connection.since() + kHandshakeTime <= now)
    drop(newcomers_.front());
}

void Server::Impl::warn_of_strangers(Clock::time_point now) {
  if (num_strangers_ == 0 || now < next_warning_) return;
  log::warn("the store at {} has dropped {} connection(s) that did not prove to know the job's "
            "secret (strangers, or ranks that ended while they connected)",
            address_.text(), std::exchange(num_strangers_, 0));
  next_warning_ = now + kBetweenWarnings;
}

Server::Server(const net::Address& address, net::Secret secret, std::size_t capacity_bytes,
               std::uint32_t generation)
    : impl_(std::make_unique<Impl>(address, std::move(secret), capacity_bytes, generation)) {}

Server::~Server() = default;

net::Address Server::address() const { return impl_->address(); }

namespace {

constexpr milliseconds kOthersMayTake(5000);
constexpr milliseconds kRequest(5000);

}  // namespace

RankStore::RankStore(const net::Address& address, const net::Secret& secret,
                     std::unique_ptr<Server> server, int num_ranks, Deadline deadline)
    : Client(address, secret, deadline), server_(std::move(server)), num_ranks_(num_ranks) {}

RankStore::~RankStore() {
  const std::string key = "lockstep/ranks-done-with-the-store";
  const auto count = [&](int amount) { return add(key, amount, Deadline::after(kRequest)); };
  try {
    auto done = count(1);
    const Deadline patience = Deadline::after(kOthersMayTake);
    while (server_ && done < num_ranks_) {
      if (patience.passed()) {
        log::warn("{} of {} ranks have not left the store that this rank hosts, and lose it now",
                  num_ranks_ - done, num_ranks_);
        break;
      }
      std::this_thread::sleep_for(milliseconds(2));
      done = count(0);
    }
  } catch (const Error& error) {
    log::debug("leaving the store: {}", error.what());
  }
}

}  // namespace lockstep::store
