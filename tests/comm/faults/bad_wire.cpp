#include "bad_wire.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm::faults {

namespace {

// Greetings are shorter than this; data is longer.
constexpr std::size_t kLongPiece = 4096;

void reset(const net::Fd& socket) {
  const linger now{1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
}

}  // namespace

BadWire::BadWire(net::Address target)
    : target_(std::move(target)),
      listener_(net::listen_tcp({"127.0.0.1", 0})),
      address_{"127.0.0.1", net::local_port(listener_)},
      thread_([this] { run(); }) {}

BadWire::~BadWire() {
  stop_ = true;
  thread_.join();
}

// False once one side is done.
bool BadWire::pass(const net::Fd& from, const net::Fd& to) {
  std::array<std::byte, 65536> buffer;
  const ssize_t got = ::recv(from.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  const auto size = static_cast<std::size_t>(got);
  if (size >= kLongPiece && flip_.exchange(false)) {
    buffer[size / 2] ^= std::byte{0x10};
    ++flips_;
  }
  try {
    net::write_all(to, std::span(buffer).first(size), Deadline::after(milliseconds(2000)));
  } catch (const CommError&) {
    return false;
  }
  bytes_ += size;
  return true;
}

void BadWire::run() {
  std::list<Pair> pairs;
  while (!stop_) {
    if (cut_.exchange(false)) {
      for (const Pair& pair : pairs) {
        reset(pair.a);
        reset(pair.b);
      }
      pairs.clear();
    }
    std::vector<pollfd> polled = {{listener_.get(), POLLIN, 0}};
    for (const Pair& pair : pairs) {
      const short events = hold_ ? 0 : POLLIN;
      polled.push_back({pair.a.get(), events, 0});
      polled.push_back({pair.b.get(), events, 0});
    }
    ::poll(polled.data(), polled.size(), 5);
    if (net::Fd arrived = hold_ ? net::Fd() : net::accept(listener_)) {
      int error = 0;
      net::Fd onward = net::try_connect_tcp(target_, Deadline::after(milliseconds(1000)), error);
      if (onward) {
        pairs.push_back({std::move(arrived), std::move(onward)});
        ++connections_;
      }
      continue;
    }
    if (hold_) continue;
    std::size_t at = 1;
    for (auto pair = pairs.begin(); pair != pairs.end() && at < polled.size(); at += 2) {
      bool open = true;
      if (polled[at].revents != 0) open = pass(pair->a, pair->b);
      if (open && polled[at + 1].revents != 0) open = pass(pair->b, pair->a);
      pair = open ? std::next(pair) : pairs.erase(pair);
    }
  }
}

}  // namespace lockstep::comm::faults
