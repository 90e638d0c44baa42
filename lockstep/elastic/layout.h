// Which rank runs where.
#pragma once

#include <numeric>
#include <string>
#include <vector>

namespace lockstep::elastic {

struct Node {
  std::string host;  // its name in messages
  int num_ranks = 1;
  std::string address;  // "host:port" where its launcher can be reached
};

// The whole job as every launcher sees it once all have met. Ranks are numbered by node, without
// gaps; nodes may run different numbers of them. Each time the job is formed it has a new layout,
// with the next generation.
struct Layout {
  std::vector<Node> nodes;
  int node_rank = 0;        // of this launcher; node 0's decides for all
  std::string master_addr;  // where rank 0 may listen for torch.distributed's own store
  int master_port = 0;
  std::string store;  // "host:port" of the job's store, which is this generation's own
  int generation = 0;
  int num_restarts = 0;  // of those that --max-restarts allows, used up so far
  int max_restarts = 0;

  int num_nodes() const { return static_cast<int>(nodes.size()); }
  const Node& here() const { return nodes[static_cast<std::size_t>(node_rank)]; }
  int num_local_ranks() const { return here().num_ranks; }
  int first_rank_of(int node) const {
    return std::accumulate(nodes.begin(), nodes.begin() + node, 0,
                           [](int sum, const Node& one) { return sum + one.num_ranks; });
  }
  int first_rank() const { return first_rank_of(node_rank); }
  int world_size() const { return first_rank_of(num_nodes()); }

  // For other launchers, as JSON. decode throws CommError (corrupted) where the text is no layout.
  std::string encode() const;
  static Layout decode(const std::string& text);
};

}  // namespace lockstep::elastic
