// Connects a group's transport: every rank connects to the ranks before it and accepts connections
// from the ranks after it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/comm/transport/transport.h>

namespace lockstep::comm {

// The links that a group may use.
enum class Media : std::uint8_t {
  automatic,      // shared memory inside a host, TCP between hosts
  shared_memory,  // only shared memory; UsageError if ranks are on several hosts
  tcp,            // only TCP, also inside a host
};

struct Membership {
  std::string group_id;    // the same on all members, different from every other group's
  std::string group_name;  // for messages
  int rank = 0;
  std::vector<EndpointAddress> addresses;  // addresses of the members, in order
};

// Tells which ranks share a host.
Topology topology_of(const std::vector<EndpointAddress>& addresses);

// Makes a group's id, which every connection names, from a text of any length: users choose run
// ids, and nested groups add to them.
std::string group_id_from(const std::string& text);

// Blocks until all links are connected. CommError (timeout) names the ranks that did not come.
std::unique_ptr<Transport> connect_group(const std::shared_ptr<Endpoint>& endpoint,
                                         const Membership& membership, Media media,
                                         Deadline deadline);

}  // namespace lockstep::comm
