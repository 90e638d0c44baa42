// How the launchers of a job's hosts find each other.
//
// The launcher of node 0 runs the job's store at the endpoint that all were told, and beside it a
// listener of its own, whose port it leaves in the store. The others connect to both, introduce
// themselves, and get the layout once all have come. The connections stay open: they are how a
// launcher learns that another one failed.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/layout.h>
#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/server.h>

namespace lockstep::elastic {

struct RendezvousOptions {
  int num_nodes = 1;
  std::optional<int> node_rank;  // unset: by order of arrival
  int num_local_ranks = 1;
  std::string host;  // this host's name in messages
  std::string run_id;
  net::Address endpoint;  // of the store; port 0 only for a single node
  std::string master_addr;
  int master_port = 0;  // 0: one that is free
  milliseconds timeout{0};
};

// What a launcher holds while its job runs.
struct Membership {
  Layout layout;
  std::unique_ptr<store::Server> server;  // in the launcher of node 0
  // By node rank: in the launcher of node 0 one to each of the others, elsewhere only that to
  // node 0.
  std::vector<Channel> channels;
};

// UsageError where an address does not resolve, is not this host's or is taken; CommError where
// the others do not come in time (naming the missing node ranks) or the secret differs.
Membership meet(const RendezvousOptions& options, const net::Secret& secret);

// A port of this host that nothing listens on and that the kernel does not hand out by itself.
int free_port(const std::string& host);

}  // namespace lockstep::elastic
