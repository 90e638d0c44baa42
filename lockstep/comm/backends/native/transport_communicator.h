// The communicator over our own transports: shared memory inside a host, TCP between hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/device_lane.h>
#include <lockstep/comm/transport/connect.h>

namespace lockstep::comm::backends {

struct TransportOptions {
  Media media = Media::automatic;
  Algorithm algorithm = Algorithm::automatic;  // for calls that ask for none
  milliseconds timeout{600'000};
  Lane lane = {};
};

// Connects the group: every member calls it with the same id, and with the addresses of all members
// in order. Blocks until all are connected. CommError (timeout) names the ranks that did not come.
std::shared_ptr<Communicator> make_transport_communicator(std::shared_ptr<Endpoint> endpoint,
                                                          const GroupInfo& group,
                                                          const std::string& group_id,
                                                          std::vector<EndpointAddress> addresses,
                                                          const TransportOptions& options);

}  // namespace lockstep::comm::backends
