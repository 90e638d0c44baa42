// Which rank runs where.
#pragma once

#include <numeric>
#include <string>
#include <vector>

namespace lockstep::elastic {

struct Node {
  std::string host;
  int num_ranks = 1;
};

// The whole job as every launcher sees it once all have met. Ranks are numbered by node, without
// gaps; nodes may run different numbers of them.
struct Layout {
  std::vector<Node> nodes;
  int node_rank = 0;        // of this launcher
  std::string master_addr;  // where rank 0 may listen for torch.distributed's own store
  int master_port = 0;
  std::string store;  // "host:port" of the job's store

  int num_nodes() const { return static_cast<int>(nodes.size()); }
  const Node& here() const { return nodes[static_cast<std::size_t>(node_rank)]; }
  int num_local_ranks() const { return here().num_ranks; }
  int first_rank_of(int node) const {
    return std::accumulate(nodes.begin(), nodes.begin() + node, 0,
                           [](int sum, const Node& one) { return sum + one.num_ranks; });
  }
  int first_rank() const { return first_rank_of(node_rank); }
  int world_size() const { return first_rank_of(num_nodes()); }
};

}  // namespace lockstep::elastic
