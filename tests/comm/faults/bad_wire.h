// A proxy between two ranks that damages their traffic as bad networks do.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <thread>

#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm::faults {

// Listens on loopback and passes every connection on to `target`, in both directions. One thread.
class BadWire {
 public:
  explicit BadWire(net::Address target);
  ~BadWire();

  net::Address address() const { return address_; }

  // Resets all connections at once, as a router that forgot them does.
  void cut() { cut_ = true; }
  // Changes one bit of the next long piece of data that passes.
  void flip() { flip_ = true; }
  // While held, passes no bytes.
  void hold(bool still) { hold_ = still; }

  std::uint64_t bytes() const { return bytes_; }
  int flips() const { return flips_; }
  int connections() const { return connections_; }

 private:
  struct Pair {
    net::Fd a;
    net::Fd b;
  };
  void run();
  bool pass(const net::Fd& from, const net::Fd& to);

  net::Address target_;
  net::Fd listener_;
  net::Address address_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> cut_{false};
  std::atomic<bool> flip_{false};
  std::atomic<bool> hold_{false};
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<int> flips_{0};
  std::atomic<int> connections_{0};
  std::thread thread_;
};

}  // namespace lockstep::comm::faults
