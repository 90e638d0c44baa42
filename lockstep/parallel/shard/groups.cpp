#include <lockstep/parallel/shard/groups.h>

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

}  // namespace lockstep::shard
