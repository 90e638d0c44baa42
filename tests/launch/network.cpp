#include "network.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace lockstep::launch::testing {

namespace {

std::atomic<int> networks_made{0};

bool execute(const std::string& command) {
  return std::system(("{ " + command + "; } > /dev/null 2>&1").c_str()) == 0;
}

}  // namespace

Network::Network(int size) : size_(size) {
  prefix_ = "lockstep-" + std::to_string(::getpid()) + "-" + std::to_string(networks_made++) + "-";
  const std::string hub = prefix_ + "hub";
  works_ = execute("ip netns add " + hub) &&
           execute("ip -n " + hub + " link add bridge type bridge") &&
           execute("ip -n " + hub + " link set bridge up");
  for (int host = 0; host < size_ && works_; ++host) {
    const std::string port = "port" + std::to_string(host);
    works_ = execute("ip netns add " + name(host)) &&
             execute("ip -n " + hub + " link add " + port + " type veth peer name eth0 netns " +
                     name(host)) &&
             execute("ip -n " + hub + " link set " + port + " master bridge up") &&
             execute("ip -n " + name(host) + " address add " + address(host) + "/24 dev eth0") &&
             execute("ip -n " + name(host) + " link set eth0 up") &&
             execute("ip -n " + name(host) + " link set lo up");
  }
}

Network::~Network() {
  for (int host = 0; host < size_; ++host) execute("ip netns del " + name(host));
  execute("ip netns del " + prefix_ + "hub");
}

std::string Network::name(int host) const { return prefix_ + std::to_string(host); }

Launched Network::run(int host, std::vector<std::string> arguments) const {
  std::vector<std::string> command = {"ip",
                                      "netns",
                                      "exec",
                                      name(host),
                                      LOCKSTEP_PROGRAM,
                                      "run",
                                      "--local-addr",
                                      "host" + std::to_string(host)};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return Launched(std::move(command));
}

void Network::set_link(int host, const std::string& state) const {
  execute("ip -n " + name(host) + " link set eth0 " + state);
}

void Network::drop_toward(int host, int other) const {
  execute("ip -n " + name(host) + " route add blackhole " + address(other) + "/32");
}

}  // namespace lockstep::launch::testing
