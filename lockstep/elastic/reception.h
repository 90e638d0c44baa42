// Node 0's side of the meeting: lets the other launchers in, and nobody else.
#pragma once

#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/channel.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

inline constexpr const char* kLauncherPurpose = "lockstep launcher";

// What a launcher says of itself.
struct Introduction {
  int node_rank = -1;  // -1: whichever is free
  int num_nodes = 1;
  int num_ranks = 1;
  std::string host;
  std::string run_id;

  std::string encode() const;
};

struct Guest {
  Channel channel;
  int node_rank = -1;
  int num_ranks = 1;
  std::string host;
};

// What guests must agree on with node 0.
struct Terms {
  int num_nodes = 1;
  std::string run_id;
};

// Collects guests, in order of arrival, until all nodes but node 0 are there or the deadline has
// passed. Who does not know the secret is dropped; who contradicts the terms or claims a node rank
// that is taken is told why. A guest that goes away before the end may come again.
std::vector<Guest> receive_guests(const net::Fd& listener, const net::Secret& secret,
                                  const Terms& terms, const Deadline& deadline);

// "node rank 2" or "node ranks 1 and 3"; "2 more nodes" where nobody claimed one. Empty where
// nobody is missing.
std::string missing_nodes(const std::vector<Guest>& guests, int num_nodes);

// Gives the guests that claimed none the node ranks that are left, in order of arrival.
void assign_node_ranks(std::vector<Guest>& guests, int num_nodes);

}  // namespace lockstep::elastic
