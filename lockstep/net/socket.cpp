#include <lockstep/net/socket.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/net/secret.h>

namespace lockstep::net {

namespace {

constexpr int kFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

std::string reason(int error) { return std::strerror(error); }

[[noreturn]] void fail(Fault fault, const std::string& operation, const std::string& explanation) {
  throw CommError({.fault = fault, .operation = operation, .explanation = explanation});
}

// Finishes a non-blocking connect; returns its errno, or 0 if it succeeded.
int finish_connect(const Fd& socket, const sockaddr* to, socklen_t length,
                   const Deadline& deadline) {
  if (::connect(socket.get(), to, length) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!wait_ready(socket.get(), POLLOUT, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  static_assert(kLongestUnixName + 1 == sizeof(address.sun_path));
  LOCKSTEP_CHECK(name.size() <= kLongestUnixName, "socket name of {} bytes", name.size());
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

}  // namespace

Fd listen_tcp(const Address& address, int backlog) {
  std::string last;
  for (const SocketAddress& where : resolve(address)) {
    Fd socket(::socket(where.get()->sa_family, kFlags, 0));
    const int on = 1;
    if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (socket && ::bind(socket.get(), where.get(), where.length) == 0 &&
        ::listen(socket.get(), backlog) == 0)
      return socket;
    if (errno == EADDRINUSE)
      throw UsageError("port {} on {} is in use: choose another port, or end the program that "
                       "listens there (ss -ltnp 'sport = :{}' shows it)",
                       address.port, address.host, address.port);
    if (errno == EADDRNOTAVAIL)
      throw UsageError("{} is not an address of this host: give one that 'ip address' lists, or "
                       "a name that resolves to one",
                       address.host);
    last = reason(errno);
  }
  throw UsageError("cannot listen on {}: {}", address.text(), last);
}

Address local_address(const Fd& socket) {
  SocketAddress self;
  self.length = sizeof(self.storage);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&self.storage), &self.length);
  return self.address();
}

int free_port(const std::string& host) {
  // These ports are below the range from which the kernel takes ports for outgoing connections, so
  // the port stays free until it is used.
  constexpr int kLowest = 20000, kHighest = 32767;
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::uint32_t draw = 0;
    fill_random(std::as_writable_bytes(std::span(&draw, 1)));
    const int port = kLowest + static_cast<int>(draw % (kHighest - kLowest + 1));
    try {
      listen_tcp({host, port});
      return port;
    } catch (const UsageError&) {
      // Either the port is taken, or the address is not this host's; the latter fails below.
    }
  }
  return local_port(listen_tcp({host, 0}));
}

Address peer_address(const Fd& socket) {
  SocketAddress peer;
  peer.length = sizeof(peer.storage);
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.length) != 0)
    return {};
  return peer.address();
}

int local_port(const Fd& socket) { return local_address(socket).port; }

Fd try_connect_tcp(const Address& address, const Deadline& deadline, int& error) {
  error = 0;
  for (const SocketAddress& where : resolve(address)) {
    Fd socket(::socket(where.get()->sa_family, kFlags, 0));
    error = socket ? finish_connect(socket, where.get(), where.length, deadline) : errno;
    if (error == 0) {
      set_no_delay(socket);
      return socket;
    }
  }
  return {};
}

Fd connect_tcp(const Address& address, const Deadline& deadline, IfRefused if_refused) {
  milliseconds pause(5);
  while (true) {
    int error = 0;
    if (Fd socket = try_connect_tcp(address, deadline, error)) return socket;
    if (error == ECONNREFUSED && if_refused == IfRefused::give_up)
      fail(Fault::peer_lost, "connect to " + address.text(),
           "Nobody listens there any more: that process has ended.");
    if (deadline.passed())
      fail(Fault::timeout, "connect to " + address.text(),
           fmt::format("Nobody answered there within {:.1f} s ({}). Is that process running, and "
                       "does a firewall let it be reached?",
                       deadline.span_seconds(), reason(error)));
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline.remaining()));
    pause = std::min(pause * 2, milliseconds(100));
  }
}

Fd listen_unix(const std::string& name, int backlog) {
  Fd socket(::socket(AF_UNIX, kFlags, 0));
  const auto [address, length] = abstract_address(name);
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(socket.get(), backlog) != 0)
    throw UsageError("cannot listen on Unix socket '{}': {}", name, reason(errno));
  return socket;
}

Fd connect_unix(const std::string& name, const Deadline& deadline) {
  const auto [address, length] = abstract_address(name);
  while (true) {
    Fd socket(::socket(AF_UNIX, kFlags, 0));
    if (!socket) fail(Fault::peer_lost, "connect to Unix socket", reason(errno));
    const int error =
        finish_connect(socket, reinterpret_cast<const sockaddr*>(&address), length, deadline);
    if (error == 0) return socket;
    // EAGAIN: the listener's queue is full for the moment.
    if (error != EAGAIN || deadline.passed())
      fail(error == EAGAIN ? Fault::timeout : Fault::peer_lost, "connect to Unix socket",
           reason(error));
    std::this_thread::sleep_for(milliseconds(1));
  }
}

std::pair<Fd, Fd> socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, kFlags, 0, ends) != 0)
    throw UsageError("cannot make a pair of sockets: {}", reason(errno));
  return {Fd(ends[0]), Fd(ends[1])};
}

Fd accept(const Fd& listener) {
  Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) set_no_delay(socket);
  return socket;
}

bool out_of_descriptors(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

Fd make_event() {
  Fd event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!event)
    throw UsageError("cannot make an event: {}; raise the limit on open files with 'ulimit -n'",
                     reason(errno));
  return event;
}

void set_no_delay(const Fd& socket) {
  const int on = 1;  // fails harmlessly on Unix sockets
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void set_keep_alive(const Fd& socket) {
  const auto set = [&](int level, int option, int value) {
    ::setsockopt(socket.get(), level, option, &value, sizeof(value));
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 25000);  // the same for bytes being sent
}

bool wait_ready(int fd, short events, const Deadline& deadline) {
  while (true) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.poll_timeout());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw UsageError("poll failed: {}", reason(errno));
    if (deadline.passed()) return false;
  }
}

void read_all(const Fd& socket, std::span<std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got == 0 || errno == ECONNRESET || errno == EPIPE) {
      fail(Fault::peer_lost, "read", "The other side closed the connection.");
    } else if (errno == EAGAIN) {
      if (!wait_ready(socket.get(), POLLIN, deadline))
        fail(Fault::timeout, "read",
             fmt::format("Nothing arrived within {:.1f} s.", deadline.span_seconds()));
    } else if (errno != EINTR) {
      fail(Fault::peer_lost, "read", reason(errno));
    }
  }
}

void write_all(const Fd& socket, std::span<const std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const ssize_t put = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (put > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    } else if (put < 0 && errno == EAGAIN) {
      if (!wait_ready(socket.get(), POLLOUT, deadline))
        fail(Fault::timeout, "write",
             fmt::format("The other side took nothing for {:.1f} s.", deadline.span_seconds()));
    } else if (put < 0 && errno != EINTR) {
      fail(Fault::peer_lost, "write", reason(errno));
    }
  }
}

void send_descriptors(const Fd& socket, const std::vector<int>& descriptors,
                      const Deadline& deadline) {
  char byte = 0;
  iovec payload{&byte, 1};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * descriptors.size()));
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
  std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  while (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) != 1) {
    if (errno != EAGAIN && errno != EINTR)
      fail(Fault::peer_lost, "pass descriptors", reason(errno));
    if (!wait_ready(socket.get(), POLLOUT, deadline))
      fail(Fault::timeout, "pass descriptors", "The other side did not take them.");
  }
}

std::vector<Fd> receive_descriptors(const Fd& socket, std::size_t count, const Deadline& deadline) {
  char byte = 0;
  iovec payload{&byte, 1};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * count));
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  while ((got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC)) < 0) {
    if (errno != EAGAIN && errno != EINTR)
      fail(Fault::peer_lost, "receive descriptors", reason(errno));
    if (!wait_ready(socket.get(), POLLIN, deadline))
      fail(Fault::timeout, "receive descriptors", "The other side did not send them.");
  }
  std::vector<Fd> received;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t here = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < here; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      received.emplace_back(fd);
    }
  }
  if (got == 0)
    fail(Fault::peer_lost, "receive descriptors", "The other side closed the connection.");
  if ((message.msg_flags & MSG_CTRUNC) != 0 || received.size() != count)
    fail(Fault::corrupted, "receive descriptors",
         fmt::format("Expected {} descriptors, got {}{}.", count, received.size(),
                     (message.msg_flags & MSG_CTRUNC) != 0 ? " and more" : ""));
  return received;
}

}  // namespace lockstep::net
