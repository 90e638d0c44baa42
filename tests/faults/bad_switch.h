// A switch between the hosts of a Network that loses and delays frames, for kernels without netem.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include <lockstep/net/fd.h>

#include "tests/launch/network.h"

namespace lockstep::faults {

struct BadSwitchOptions {
  double loss = 0;  // the share of frames that never arrive
  std::chrono::milliseconds delay{0};
};

// Takes the bridge's place from construction on. Owns its thread and sockets; the network must
// outlive it.
class BadSwitch {
 public:
  BadSwitch(const launch::testing::Network& network, int num_hosts, BadSwitchOptions options);
  ~BadSwitch();
  BadSwitch(const BadSwitch&) = delete;
  BadSwitch& operator=(const BadSwitch&) = delete;

  // False if this process may not read and write frames.
  bool works() const { return works_; }
  std::int64_t num_passed() const { return passed_; }
  std::int64_t num_lost() const { return lost_; }

 private:
  void open_ports(const launch::testing::Network& network, int num_hosts);
  void run();

  BadSwitchOptions options_;
  bool works_ = true;
  std::vector<net::Fd> ports_;
  std::atomic<bool> stop_ = false;
  std::atomic<std::int64_t> passed_ = 0, lost_ = 0;
  std::thread thread_;
};

}  // namespace lockstep::faults
