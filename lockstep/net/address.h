// Host names, addresses and ports.
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::net {

struct Address {
  std::string host;  // a name or a numeric IPv4/IPv6 address, without brackets
  int port = 0;      // 0: the kernel chooses (listening only)

  // Parses "host:port", "[::1]:port", or "host", which gets the default port. UsageError otherwise;
  // `what` names the flag or variable that the text came from.
  static Address parse(std::string_view text, int default_port, std::string_view what);

  std::string text() const;
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  Address address() const;
};

// Looks a name up. UsageError if it does not resolve; never returns an empty list.
std::vector<SocketAddress> resolve(const Address& address);

// The name of this host.
std::string own_host_name();

// The address that this host would use to reach `peer`, to be given to other hosts.
std::string local_host_toward(const Address& peer);

}  // namespace lockstep::net
