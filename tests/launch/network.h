// Several hosts on one machine: network namespaces, joined by a bridge.
#pragma once

#include <string>

#include "launched.h"

namespace lockstep::launch::testing {

// `size` hosts, named host0, host1, …, each with its own address. The destructor removes
// everything.
class Network {
 public:
  explicit Network(int size);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // False if this process may not make namespaces.
  bool works() const { return works_; }

  static std::string address(int host) { return "10.77.0." + std::to_string(host + 1); }

  // The name of a host's network namespace.
  std::string name(int host) const;
  // The name of the network namespace with the bridge, and with a port0, port1, … for each host.
  std::string hub() const { return prefix_ + "hub"; }

  // Runs `lockstep run` on one of the hosts.
  Launched run(int host, std::vector<std::string> arguments) const;

  void set_link(int host, const std::string& state) const;

  // From now on, packets from `host` to `other` are lost.
  void drop_toward(int host, int other) const;

 private:
  int size_;
  std::string prefix_;
  bool works_ = true;
};

}  // namespace lockstep::launch::testing
