// What a launcher brings to the meeting of a job's launchers, and what it asks of the others.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/introduction.h>
#include <lockstep/net/address.h>

namespace lockstep::elastic {

// Where it is settled which launcher is node 0's.
enum class Rendezvous {
  embedded,  // among the launchers themselves, which meet at the first endpoint
  etcd,      // in etcd, whose members are the endpoints
};

struct MeetingOptions {
  int min_nodes = 1;
  int max_nodes = 1;
  int max_restarts = 0;
  std::optional<int> node_rank;  // unset: by order of arrival
  int num_local_ranks = 1;
  std::string host;  // this host's name in messages
  std::string run_id;
  Rendezvous rendezvous = Rendezvous::embedded;
  // Embedded: node 0 is at the first; port 0 only for a single node.
  std::vector<net::Address> endpoints;
  std::string local_addr;  // of this host, where others reach it; empty: whichever leads to etcd
  std::string master_addr;
  int master_port = 0;  // 0: one that is free
  milliseconds timeout{0};
  milliseconds last_call{0};   // for more than min_nodes to come, since the last one came
  milliseconds leave_soon{0};  // for ranks to complete a step when nodes come

  // Whether more launchers may come while the job runs.
  bool elastic() const { return min_nodes < max_nodes || (max_nodes > 1 && max_restarts > 0); }
};

Introduction introduce(const MeetingOptions& options, const std::string& address);

}  // namespace lockstep::elastic
