#include <lockstep/comm/transport/endpoint.h>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <list>
#include <sstream>
#include <utility>

#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm {

Mailbox::Mailbox() : event_(net::make_event()) {}

net::Fd Mailbox::take(int from, Deadline deadline) {
  std::unique_lock lock(mutex_);
  arrived_.wait_until(lock, deadline.at(), [&] { return waiting_.contains(from); });
  const auto found = waiting_.find(from);
  if (found == waiting_.end()) return {};
  net::Fd connection = std::move(found->second);
  waiting_.erase(found);
  lower_event_if_empty();
  return connection;
}

void Mailbox::keep_only(const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  kept_.emplace(ranks.begin(), ranks.end());
  std::erase_if(waiting_, [this](const auto& entry) { return !kept_->contains(entry.first); });
  lower_event_if_empty();
}

void Mailbox::put(int from, net::Fd connection) {
  const std::lock_guard lock(mutex_);
  if (kept_ && !kept_->contains(from)) return;
  waiting_[from] = std::move(connection);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof(one));
  arrived_.notify_all();
}

std::size_t Mailbox::num_waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_.size();
}

bool Mailbox::all_hung_up() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(waiting_.begin(), waiting_.end(), [](const auto& entry) {
    pollfd polled{entry.second.get(), POLLRDHUP, 0};
    return ::poll(&polled, 1, 0) > 0;
  });
}

void Mailbox::lower_event_if_empty() {
  if (!waiting_.empty()) return;
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof(count));
}

namespace {

template <typename List>
auto find_group(List& list, const std::string& group_id) {
  return std::find_if(list.begin(), list.end(),
                      [&](const auto& one) { return one.group_id == group_id; });
}

}  // namespace

std::shared_ptr<Mailbox> Mailroom::open(const std::string& group_id) {
  const std::lock_guard lock(mutex_);
  note_left();
  LOCKSTEP_CHECK(!is_over(group_id), "group id '{}' is used again", group_id);
  auto box = mailbox(group_id);
  if (!box) box = std::make_shared<Mailbox>();
  opened_[group_id] = box;
  if (const auto early = find_group(early_, group_id); early != early_.end()) early_.erase(early);
  return box;
}

void Mailroom::close(const std::string& group_id, const Notice& notice) {
  const std::lock_guard lock(mutex_);
  // The first reason counts.
  if (find_group(failed_, group_id) != failed_.end()) return;
  failed_.push_back({group_id, notice});
  if (failed_.size() > limits_.most_failed) failed_.pop_front();
}

GroupState Mailroom::state(const std::string& group_id) const {
  const std::lock_guard lock(mutex_);
  GroupState state;
  const auto box = mailbox(group_id);
  if (box) state.sequence = box->sequence();
  const auto failed = find_group(failed_, group_id);
  if (failed != failed_.end()) state.notice = failed->notice;
  state.open = box != nullptr && !state.notice;
  return state;
}

void Mailroom::deliver(const std::string& group_id, int from, net::Fd connection,
                       Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (is_over(group_id)) return;
  auto box = mailbox(group_id);
  if (!opened_.contains(group_id)) {
    // A peer may be faster than this rank: its connection is kept until the group is opened here.
    if (!box) {
      box = std::make_shared<Mailbox>();
      early_.push_back({group_id, box, now});
    }
    find_group(early_, group_id)->since = now;
  }
  if (!box) return;  // the group was left this very moment
  box->put(from, std::move(connection));
  bound_early();
}

bool Mailroom::sweep(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  std::erase_if(early_, [&](const Early& early) {
    return now - early.since >= limits_.hung_up_time && early.mailbox->all_hung_up();
  });
  return !early_.empty();
}

bool Mailroom::is_over(const std::string& group_id) const {
  const auto found = opened_.find(group_id);
  return (found != opened_.end() && found->second.expired()) ||
         find_group(failed_, group_id) != failed_.end() ||
         std::find(left_.begin(), left_.end(), group_id) != left_.end();
}

// The mailbox of a group that is open or not yet open; null for other groups.
std::shared_ptr<Mailbox> Mailroom::mailbox(const std::string& group_id) const {
  if (const auto found = opened_.find(group_id); found != opened_.end())
    return found->second.lock();
  const auto early = find_group(early_, group_id);
  return early == early_.end() ? nullptr : early->mailbox;
}

// A group ends when its pointer goes, which may be at any time, so expired entries are found by
// looking at all of them.
void Mailroom::note_left() {
  std::erase_if(opened_, [this](const auto& entry) {
    const bool left = entry.second.expired();
    if (left) left_.push_back(entry.first);
    return left;
  });
  while (left_.size() > limits_.most_left) left_.pop_front();
}

void Mailroom::bound_early() {
  std::size_t connections = 0;
  for (const Early& early : early_) connections += early.mailbox->num_waiting();
  while (early_.size() > limits_.most_early_groups ||
         (connections > limits_.most_early_connections && !early_.empty())) {
    connections -= early_.front().mailbox->num_waiting();
    early_.pop_front();
  }
}

namespace {

constexpr milliseconds kGreetingTime(2000);
// With this many connections being greeted, further ones wait in the kernel's queue.
constexpr std::size_t kMostGreetings = 512;
constexpr milliseconds kPauseWithoutDescriptors(100);
// Pauses between looks at connections that are being greeted, and at those that wait for a group.
constexpr milliseconds kLook(100);
constexpr milliseconds kSweep(60'000);
// Attempts of a rank whose connection is dropped during the greeting; pauses grow to the longest.
constexpr int kMostAttempts = 20;
constexpr milliseconds kLongestPause(100);

// The purpose that a connection states.
constexpr std::string_view kJoin = "group ";       // followed by "<from> <group id>"
constexpr std::string_view kAsk = "ask ";          // followed by "<group id>"
constexpr std::string_view kInquire = "inquire ";  // followed by the question
constexpr std::uint32_t kLongestReply = 1u << 20;

struct AnswerHeader {
  std::uint64_t sequence = 0;
  std::uint32_t open = 0;
  std::uint32_t notice_bytes = 0;
};

std::string random_name() {
  std::array<std::byte, 12> bytes;
  net::fill_random(bytes);
  std::string text = "lockstep-";
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

std::vector<int> usable_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

std::string purpose_of(const std::string& group_id, int from) {
  return fmt::format("{}{} {}", kJoin, from, group_id);
}

}  // namespace

std::string EndpointAddress::encode() const {
  std::string text = fmt::format("{}\n{}\n{}\n{}\n", host, unix_name, tcp.host, tcp.port);
  for (const int core : cores) text += fmt::format("{} ", core);
  return text;
}

// Throws if the text would not be written the same way again.
EndpointAddress EndpointAddress::decode(const std::string& text) {
  EndpointAddress address;
  std::istringstream in(text);
  std::string port;
  std::getline(in, address.host);
  std::getline(in, address.unix_name);
  std::getline(in, address.tcp.host);
  std::getline(in, port);
  std::from_chars(port.data(), port.data() + port.size(), address.tcp.port);
  for (int core = 0; address.cores.size() < CPU_SETSIZE && in >> core;)
    address.cores.push_back(core);
  const bool cores_fit =
      std::is_sorted(address.cores.begin(), address.cores.end()) &&
      (address.cores.empty() || (address.cores.front() >= 0 && address.cores.back() < CPU_SETSIZE));
  if (address.encode() != text || address.host.empty() || address.unix_name.empty() ||
      address.unix_name.size() > net::kLongestUnixName || address.tcp.host.empty() ||
      address.tcp.port < 0 || address.tcp.port > 65535 || !cores_fit)
    throw CommError({.fault = Fault::corrupted,
                     .operation = "read a rank's address",
                     .explanation = fmt::format("'{}' is no address.", text.substr(0, 200))});
  return address;
}

// A connection being greeted.
struct Endpoint::Greeting {
  Greeting(net::Fd connection, const net::Secret& secret)
      : connection(std::move(connection)),
        acceptor(secret),
        deadline(Deadline::after(kGreetingTime)) {}

  net::Fd connection;
  net::Acceptor acceptor;
  Deadline deadline;
};

// The state of the thread that accepts connections.
struct Endpoint::Reception {
  std::list<Greeting> greetings;
  Clock::time_point accepts_from{};
  bool warned = false;  // the warning about descriptors was logged
};

Endpoint::Endpoint(const std::string& bind_host, net::Secret secret)
    : secret_(std::move(secret)),
      address_{host_identity(), random_name(), {bind_host, 0}, usable_cores()},
      unix_listener_(net::listen_unix(address_.unix_name)),
      tcp_listener_(net::listen_tcp(address_.tcp)),
      stop_event_(net::make_event()) {
  // The address is numeric, so that no name has to be looked up while a call waits.
  address_.tcp = net::local_address(tcp_listener_);
  thread_ = std::thread([this] { serve(); });
}

Endpoint::~Endpoint() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stop_event_.get(), &one, sizeof(one));
  thread_.join();
}

net::Fd Endpoint::connect(const EndpointAddress& to, const std::string& group_id, int from,
                          Medium medium, Deadline deadline) const {
  milliseconds pause(5);
  for (int attempt = 1;; ++attempt) {
    // A process listens before it tells its address: one that does not listen has ended.
    net::Fd connection = medium == Medium::tcp
                             ? net::connect_tcp(to.tcp, deadline, net::IfRefused::give_up)
                             : net::connect_unix(to.unix_name, deadline);
    try {
      net::introduce(connection, secret_, purpose_of(group_id, from), deadline);
      return connection;
    } catch (const CommError& error) {
      // On a crowded host either side may not get to run for longer than a greeting may take.
      if (error.fault() != Fault::peer_lost || attempt == kMostAttempts || deadline.passed()) throw;
    }
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline.remaining()));
    pause = std::min(pause * 2, kLongestPause);
  }
}

Endpoint::Answer Endpoint::ask(const net::Fd& connection, const std::string& group_id,
                               Deadline deadline) const {
  net::introduce(connection, secret_, std::string(kAsk) + group_id, deadline);
  AnswerHeader header;
  net::read_all(connection, std::as_writable_bytes(std::span(&header, 1)), deadline);
  if (header.notice_bytes == 0)
    return {.open = header.open != 0, .sequence = header.sequence, .notice = {}};
  if (header.notice_bytes > Notice::kMostBytes)
    throw CommError({.fault = Fault::corrupted, .operation = "ask about a group"});
  std::vector<std::byte> text(header.notice_bytes);
  net::read_all(connection, text, deadline);
  return {.open = false, .sequence = header.sequence, .notice = Notice::decode(text)};
}

std::string Endpoint::inquire(const EndpointAddress& to, const std::string& question,
                              Deadline deadline) const {
  const net::Fd connection = to.host == address_.host
                                 ? net::connect_unix(to.unix_name, deadline)
                                 : net::connect_tcp(to.tcp, deadline, net::IfRefused::give_up);
  net::introduce(connection, secret_, std::string(kInquire) + question, deadline);
  std::uint32_t bytes = 0;
  net::read_all(connection, std::as_writable_bytes(std::span(&bytes, 1)), deadline);
  if (bytes > kLongestReply)
    throw CommError({.fault = Fault::corrupted, .operation = "ask a rank"});
  std::string reply(bytes, '\0');
  net::read_all(connection, std::as_writable_bytes(std::span(reply)), deadline);
  return reply;
}

void Endpoint::set_answers(Answers answers) {
  const std::lock_guard lock(answers_mutex_);
  answers_ = std::move(answers);
}

void Endpoint::answer_inquiry(const std::string& question, const net::Fd& connection) {
  std::string reply;
  {
    const std::lock_guard lock(answers_mutex_);
    if (!answers_) return;
    reply = answers_(question);
  }
  const auto bytes = static_cast<std::uint32_t>(reply.size());
  reply.insert(0, reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  // An answer that does not fit into the fresh connection's buffer is lost.
  [[maybe_unused]] const auto sent =
      ::send(connection.get(), reply.data(), reply.size(), MSG_NOSIGNAL);
}

void Endpoint::answer(const std::string& group_id, const net::Fd& connection) {
  const GroupState state = mailroom_.state(group_id);
  std::vector<std::byte> text;
  if (state.notice) text = state.notice->encode();
  AnswerHeader header{.sequence = state.sequence, .open = state.open};
  header.notice_bytes = static_cast<std::uint32_t>(text.size());
  std::vector<std::byte> reply(sizeof(header));
  std::memcpy(reply.data(), &header, sizeof(header));
  reply.insert(reply.end(), text.begin(), text.end());
  // Small enough for a fresh connection's buffer; a rank that gets no answer asks again.
  [[maybe_unused]] const auto sent =
      ::send(connection.get(), reply.data(), reply.size(), MSG_NOSIGNAL);
}

// Nothing that comes from outside may end the process: on an error (out of memory, most likely) the
// connections that are being greeted are dropped.
void Endpoint::serve() {
  Reception reception;
  while (true) {
    try {
      if (!serve(reception)) return;
    } catch (const std::exception& error) {
      log::error("connections that were being greeted are dropped: {}", error.what());
      reception.greetings.clear();
    }
  }
}

// Handles one round of events; false once the endpoint ends.
bool Endpoint::serve(Reception& reception) {
  auto& greetings = reception.greetings;
  const auto now = Clock::now();
  const bool accepts = greetings.size() < kMostGreetings && now >= reception.accepts_from;
  const auto listens = static_cast<short>(accepts ? POLLIN : 0);
  std::vector<pollfd> polled{{stop_event_.get(), POLLIN, 0},
                             {unix_listener_.get(), listens, 0},
                             {tcp_listener_.get(), listens, 0}};
  for (const Greeting& greeting : greetings)
    polled.push_back({greeting.connection.get(), POLLIN, 0});
  const bool anyone_early = mailroom_.sweep(now);
  const milliseconds pause = !greetings.empty() || now < reception.accepts_from ? kLook
                             : anyone_early                                     ? kSweep
                                                                                : milliseconds(-1);
  ::poll(polled.data(), polled.size(), static_cast<int>(pause.count()));
  if (polled[0].revents != 0) return false;

  std::size_t index = 3;
  for (auto greeting = greetings.begin(); greeting != greetings.end(); ++index) {
    const bool over = polled[index].revents != 0 ? advance(*greeting) : false;
    greeting =
        over || greeting->deadline.passed() ? greetings.erase(greeting) : std::next(greeting);
  }
  if ((polled[1].revents & POLLIN) != 0) accept_from(unix_listener_, reception);
  if ((polled[2].revents & POLLIN) != 0) accept_from(tcp_listener_, reception);
  return true;
}

void Endpoint::accept_from(const net::Fd& listener, Reception& reception) {
  while (reception.greetings.size() < kMostGreetings) {
    net::Fd connection = net::accept(listener);
    if (connection) {
      reception.greetings.emplace_back(std::move(connection), secret_);
      continue;
    }
    const int error = errno;
    if (!net::out_of_descriptors(error)) return;
    // New connections wait in the kernel's queue, for as long as the deadlines of their ranks
    // allow.
    reception.accepts_from = Clock::now() + kPauseWithoutDescriptors;
    if (!std::exchange(reception.warned, true))
      log::warn("other ranks cannot connect to this one: {}. Each connection takes a descriptor: "
                "raise the limit with 'ulimit -n', or find what holds so many open (ls -l "
                "/proc/{}/fd)",
                std::strerror(error), ::getpid());
    return;
  }
}

// True once the greeting is over, whether it succeeded or not.
bool Endpoint::advance(Greeting& greeting) {
  std::array<std::byte, 1024> buffer;
  while (greeting.acceptor.state() == net::Acceptor::State::reading) {
    const std::size_t wanted = std::min(buffer.size(), greeting.acceptor.wanted());
    const ssize_t got = ::recv(greeting.connection.get(), buffer.data(), wanted, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got <= 0) return true;
    const auto reply =
        greeting.acceptor.take(std::span(buffer).first(static_cast<std::size_t>(got)));
    // A fresh connection's buffer takes a reply this small whole; if it does not, the peer
    // misbehaves.
    if (!reply.empty() && ::send(greeting.connection.get(), reply.data(), reply.size(),
                                 MSG_NOSIGNAL) != static_cast<ssize_t>(reply.size()))
      return true;
  }
  if (greeting.acceptor.state() != net::Acceptor::State::welcomed) return true;
  try {
    deliver(greeting.acceptor.purpose(), std::move(greeting.connection));
  } catch (const std::exception& error) {
    log::error("a connection is dropped: {}", error.what());
  }
  return true;
}

void Endpoint::deliver(const std::string& purpose, net::Fd connection) {
  if (purpose.starts_with(kAsk)) return answer(purpose.substr(kAsk.size()), connection);
  if (purpose.starts_with(kInquire))
    return answer_inquiry(purpose.substr(kInquire.size()), connection);
  if (!purpose.starts_with(kJoin)) return;
  int from = -1;
  const char* begin = purpose.data() + kJoin.size();
  const char* end = purpose.data() + purpose.size();
  const auto [after, error] = std::from_chars(begin, end, from);
  if (error != std::errc() || after == end || *after != ' ' || from < 0) return;
  mailroom_.deliver({after + 1, end}, from, std::move(connection));
}

}  // namespace lockstep::comm
