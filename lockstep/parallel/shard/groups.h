// The ranks that a sharded model talks to.
#pragma once

#include <memory>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/quantized.h>
#include <lockstep/parallel/shard/options.h>

namespace lockstep::shard {

// Two groups over the ranks that cut a model among them: gathers come when operators need them,
// reductions when gradients are ready, and neither order says anything about the other.
struct Groups {
  // Every rank that has samples of its own: counts, what was used, buffers.
  std::shared_ptr<comm::Communicator> all;
  // Ranks that hold the parts of one copy of the model.
  std::shared_ptr<comm::Communicator> gather;
  std::shared_ptr<comm::Communicator> reduce;
  // Ranks that hold the same part of each copy; null where there is one copy.
  std::shared_ptr<comm::Communicator> replicas;
};

// One copy, cut among all ranks of a group. Every rank calls it.
Groups shard_over(const std::shared_ptr<comm::Communicator>& all);
// As many copies as `replicas` has ranks.
Groups shard_over(const std::shared_ptr<comm::Communicator>& all,
                  const std::shared_ptr<comm::Communicator>& shard,
                  const std::shared_ptr<comm::Communicator>& replicas);

// The ranks that gather, and those that reduce, divided into the nodes of ZeRO++; null where there
// are none.
struct Nodes {
  std::shared_ptr<comm::Communicator> gather;  // the ranks of this one's node
  comm::NodeGroups reduce;
};

// Every rank calls it. UsageError, with the numbers, where ranks cannot be divided so.
Nodes make_nodes(const ZeroPlusPlusConfig& config, comm::Communicator& gather,
                 comm::Communicator& reduce);

}  // namespace lockstep::shard
