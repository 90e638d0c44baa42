// A proxy between a client and a server that can break the traffic, as a bad network does.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include <lockstep/net/socket.h>

namespace lockstep::store {

// Has one thread and a few connections. Counts and cuts by the server's bytes: the handshake and
// the greeting have kHandshakeBytes of them, and everything after is replies.
class Proxy {
 public:
  static constexpr std::size_t kHandshakeBytes = 48 + 1 + 16;

  explicit Proxy(net::Address server) : server_(std::move(server)), thread_([this] { run(); }) {}
  ~Proxy() {
    stop_ = true;
    thread_.join();
  }

  net::Address address() const { return {"127.0.0.1", net::local_port(listener_)}; }

  // From now on connections lead to another server.
  void redirect(net::Address server) {
    const std::lock_guard lock(mutex_);
    server_ = std::move(server);
  }

  // Swallows the next `count` replies and cuts their connections: the server has carried the
  // request out, and the client does not know.
  void swallow_replies(int count) { to_swallow_ = count; }
  int replies_to_swallow() const { return to_swallow_; }

  void cut_all() { cut_ = true; }

  // All bytes that the first client has sent.
  std::vector<std::byte> recorded() {
    const std::lock_guard lock(mutex_);
    return recorded_;
  }

 private:
  struct Link {
    net::Fd client;
    net::Fd server;
    std::size_t from_server = 0;
    bool recorded = false;
    bool open = true;
  };

  void run() {
    while (!stop_) {
      if (cut_.exchange(false)) links_.clear();
      std::vector<pollfd> fds{{listener_.get(), POLLIN, 0}};
      for (const Link& link : links_) {
        fds.push_back({link.client.get(), POLLIN, 0});
        fds.push_back({link.server.get(), POLLIN, 0});
      }
      ::poll(fds.data(), fds.size(), 5);
      for (Link& link : links_) {
        pass(link, link.client, link.server);
        if (link.open) pass(link, link.server, link.client);
      }
      std::erase_if(links_, [](const Link& link) { return !link.open; });
      if (net::Fd client = net::accept(listener_)) {
        const std::lock_guard lock(mutex_);
        links_.push_back({std::move(client),
                          net::connect_tcp(server_, Deadline::after(std::chrono::seconds(10))), 0,
                          std::exchange(record_, false), true});
      }
    }
  }

  void pass(Link& link, const net::Fd& from, const net::Fd& to) {
    std::array<std::byte, 65536> bytes;
    const ssize_t got = ::recv(from.get(), bytes.data(), bytes.size(), 0);
    if (got < 0) return;
    if (got == 0) {
      link.open = false;
      return;
    }
    const auto piece = std::span(bytes).first(static_cast<std::size_t>(got));
    if (&from == &link.server) {
      link.from_server += piece.size();
      if (link.from_server > kHandshakeBytes && to_swallow_ > 0) {
        --to_swallow_;
        link.open = false;
        return;
      }
    } else if (link.recorded) {
      const std::lock_guard lock(mutex_);
      recorded_.insert(recorded_.end(), piece.begin(), piece.end());
    }
    net::write_all(to, piece, Deadline::after(std::chrono::seconds(10)));
  }

  net::Fd listener_ = net::listen_tcp({"127.0.0.1", 0});
  std::atomic<bool> stop_ = false;
  std::atomic<bool> cut_ = false;
  std::atomic<int> to_swallow_ = 0;
  std::mutex mutex_;
  net::Address server_;
  std::vector<std::byte> recorded_;
  bool record_ = true;
  std::vector<Link> links_;
  std::thread thread_;
};

}  // namespace lockstep::store
