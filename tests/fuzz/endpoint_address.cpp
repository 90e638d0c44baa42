// Addresses that ranks leave in the store.
#include <algorithm>

#include <lockstep/comm/transport/connect.h>
#include <lockstep/net/socket.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  comm::EndpointAddress address;
  try {
    address = comm::EndpointAddress::decode(text);
  } catch (const CommError& error) {
    require(error.fault() == Fault::corrupted, "what is no address is corrupted");
    require(std::string_view(error.what()).size() < 1000, "a message is short");
    return;
  }
  require(address.encode() == text, "an address has one encoding");
  require(address.tcp.port >= 0 && address.tcp.port <= 65535, "a port is one");
  require(address.unix_name.size() <= net::kLongestUnixName, "the name fits a socket's address");
  for (const int core : address.cores)
    require(core >= 0 && core < 1 << 16, "cores are numbered as a kernel does");
  require(comm::topology_of({address, address}).num_hosts() == 1, "equal hosts are one");
}

}  // namespace lockstep::fuzz
