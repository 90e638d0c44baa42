#include "bad_switch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>

namespace lockstep::faults {

namespace {

using Frame = std::vector<std::byte>;

// The kernel's header for a frame that has no checksum yet, or is to be cut into several. It is
// passed on unchanged.
constexpr std::size_t kOffloadBytes = 10;
constexpr std::size_t kAddressBytes = 6;
constexpr std::size_t kLongestFrame = 70'000;

struct Waiting {
  std::chrono::steady_clock::time_point due;
  std::size_t from;
  Frame frame;
};

std::string address_at(const Frame& frame, std::size_t offset) {
  return {reinterpret_cast<const char*>(frame.data()) + kOffloadBytes + offset, kAddressBytes};
}

net::Fd open_port(const std::string& name) {
  net::Fd port(::socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, htons(ETH_P_ALL)));
  if (!port) return port;
  const int yes = 1;
  sockaddr_ll place{};
  place.sll_family = AF_PACKET;
  place.sll_protocol = htons(ETH_P_ALL);
  place.sll_ifindex = static_cast<int>(::if_nametoindex(name.c_str()));
  packet_mreq all{};
  all.mr_ifindex = place.sll_ifindex;
  all.mr_type = PACKET_MR_PROMISC;
  const int buffer = 8 << 20;
  ::setsockopt(port.get(), SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof buffer);
  if (::setsockopt(port.get(), SOL_PACKET, PACKET_VNET_HDR, &yes, sizeof yes) != 0 ||
      ::setsockopt(port.get(), SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof yes) != 0 ||
      ::setsockopt(port.get(), SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all) != 0 ||
      ::bind(port.get(), reinterpret_cast<const sockaddr*>(&place), sizeof place) != 0)
    return {};
  return port;
}

}  // namespace

BadSwitch::BadSwitch(const launch::testing::Network& network, int num_hosts,
                     BadSwitchOptions options)
    : options_(options) {
  // A thread can enter another namespace without taking other threads with it.
  std::thread([&] { open_ports(network, num_hosts); }).join();
  if (works_) thread_ = std::thread([this] { run(); });
}

BadSwitch::~BadSwitch() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void BadSwitch::open_ports(const launch::testing::Network& network, int num_hosts) {
  const net::Fd hub(::open(("/var/run/netns/" + network.hub()).c_str(), O_RDONLY | O_CLOEXEC));
  works_ = hub && ::setns(hub.get(), CLONE_NEWNET) == 0;
  for (int host = 0; host < num_hosts && works_; ++host) {
    const std::string name = "port" + std::to_string(host);
    works_ = std::system(("ip link set " + name + " nomaster > /dev/null 2>&1").c_str()) == 0;
    ports_.push_back(open_port(name));
    works_ &= static_cast<bool>(ports_.back());
  }
}

void BadSwitch::run() {
  std::mt19937 random(11);
  std::bernoulli_distribution lost(options_.loss);
  std::map<std::string, std::size_t> port_of;  // keyed by the address of the host behind the port
  std::deque<Waiting> waiting;
  const auto pass_on = [&](const Waiting& one) {
    const auto known = port_of.find(address_at(one.frame, 0));
    for (std::size_t to = 0; to < ports_.size(); ++to) {
      if (to == one.from || (known != port_of.end() && known->second != to)) continue;
      ::send(ports_[to].get(), one.frame.data(), one.frame.size(), 0);
    }
    ++passed_;
  };
  Frame buffer(kLongestFrame);
  while (!stop_) {
    std::vector<pollfd> polled;
    for (const net::Fd& port : ports_) polled.push_back({port.get(), POLLIN, 0});
    ::poll(polled.data(), polled.size(), waiting.empty() ? 20 : 1);
    const auto now = std::chrono::steady_clock::now();
    for (std::size_t from = 0; from < ports_.size(); ++from)
      // Takes a few frames at a time, so that no port waits for another.
      for (int count = 0; count < 64; ++count) {
        const ssize_t size = ::recv(ports_[from].get(), buffer.data(), buffer.size(), 0);
        if (size < static_cast<ssize_t>(kOffloadBytes + sizeof(ether_header))) break;
        Waiting one{now + options_.delay, from, Frame(buffer.begin(), buffer.begin() + size)};
        port_of[address_at(one.frame, kAddressBytes)] = from;
        if (lost(random))
          ++lost_;
        else
          waiting.push_back(std::move(one));
      }
    while (!waiting.empty() && waiting.front().due <= now) {
      pass_on(waiting.front());
      waiting.pop_front();
    }
  }
}

}  // namespace lockstep::faults
