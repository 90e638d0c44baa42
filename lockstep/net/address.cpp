#include <lockstep/net/address.h>

#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <memory>

#include <lockstep/base/error.h>
#include <lockstep/net/fd.h>

namespace lockstep::net {

Address Address::parse(std::string_view text, int default_port, std::string_view what) {
  Address address;
  address.port = default_port;
  std::string_view port;
  if (!text.empty() && text.front() == '[') {
    const auto close = text.find(']');
    if (close == std::string_view::npos)
      throw UsageError("{}: '{}' opens a bracket that it does not close: write [address]:port",
                       what, text);
    address.host = text.substr(1, close - 1);
    const auto rest = text.substr(close + 1);
    if (!rest.empty() && rest.front() != ':')
      throw UsageError("{}: '{}' is not of the form [address]:port", what, text);
    if (!rest.empty()) port = rest.substr(1);
  } else if (const auto colon = text.rfind(':');
             colon != std::string_view::npos && text.find(':') == colon) {
    address.host = text.substr(0, colon);
    port = text.substr(colon + 1);
  } else {
    address.host = text;
  }
  if (address.host.empty()) throw UsageError("{}: '{}' names no host: write host:port", what, text);
  if (!port.empty()) {
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
    if (error != std::errc() || end != port.data() + port.size() || address.port < 0 ||
        address.port > 65535)
      throw UsageError("{}: '{}' is not a port: it must be a number from 0 to 65535", what, port);
  }
  return address;
}

std::string Address::text() const {
  return host.find(':') != std::string::npos ? fmt::format("[{}]:{}", host, port)
                                             : fmt::format("{}:{}", host, port);
}

Address SocketAddress::address() const {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (getnameinfo(get(), length, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return {"?", 0};
  return {host, std::atoi(port)};
}

std::vector<SocketAddress> resolve(const Address& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  if (status != 0)
    throw UsageError("host name '{}' does not resolve ({}): check the spelling, /etc/hosts or DNS, "
                     "or give a numeric address",
                     address.host, gai_strerror(status));
  std::vector<SocketAddress> all;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_addrlen > sizeof(sockaddr_storage)) continue;
    SocketAddress one;
    std::memcpy(&one.storage, entry->ai_addr, entry->ai_addrlen);
    one.length = entry->ai_addrlen;
    all.push_back(one);
  }
  if (all.empty()) throw UsageError("host name '{}' has no address", address.host);
  return all;
}

std::string own_host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "localhost";
}

std::string local_host_toward(const Address& peer) {
  Address target = peer;
  if (target.port == 0) target.port = 9;  // any port: a UDP connect sends nothing
  for (const SocketAddress& address : resolve(target)) {
    const Fd probe(::socket(address.get()->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!probe || ::connect(probe.get(), address.get(), address.length) != 0) continue;
    SocketAddress self;
    self.length = sizeof(self.storage);
    if (::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&self.storage), &self.length) == 0)
      return self.address().host;
  }
  throw UsageError("this host has no route to {}: check the network, or name another address",
                   peer.text());
}

}  // namespace lockstep::net
