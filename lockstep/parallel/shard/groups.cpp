#include <lockstep/parallel/shard/groups.h>

#include <lockstep/base/error.h>

namespace lockstep::shard {

Groups shard_over(const std::shared_ptr<comm::Communicator>& all) {
  return {.all = all,
          .gather = all->split(0, all->rank(), "gather_parameters"),
          .reduce = all,
          .replicas = nullptr};
}

Groups shard_over(const std::shared_ptr<comm::Communicator>& all,
                  const std::shared_ptr<comm::Communicator>& shard,
                  const std::shared_ptr<comm::Communicator>& replicas) {
  if (replicas->size() == 1) return shard_over(all);
  return {.all = all,
          .gather = shard->split(0, shard->rank(), "gather_parameters"),
          .reduce = shard,
          .replicas = replicas};
}

Nodes make_nodes(const ZeroPlusPlusConfig& config, comm::Communicator& gather,
                 comm::Communicator& reduce) {
  const int per_node = config.hierarchical_partition;
  if (per_node < 0 || (config.has_nodes() && gather.size() % per_node != 0))
    throw UsageError("ZeRO++ with a hierarchical_partition of {} among {} ranks: it is how many of "
                     "them make a node, and has to divide them; 0 for no nodes",
                     per_node, gather.size());
  if (!config.has_nodes()) return {};
  return {.gather = gather.split(gather.rank() / per_node, gather.rank(), "node"),
          .reduce = comm::split_into_nodes(reduce, per_node)};
}

}  // namespace lockstep::shard
