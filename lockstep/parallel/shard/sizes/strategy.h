// Sharding strategies: what is cut among ranks.
#pragma once

namespace lockstep {

// Training gives the same result with each of them.
enum class ShardingStrategy {
  NO_SHARD,         // nothing: as DDP
  SHARD_OPTIMIZER,  // the optimizer's state: ZeRO-1
  SHARD_GRAD_OP,    // and gradients: ZeRO-2
  FULL_SHARD,       // and parameters: ZeRO-3
  HYBRID_SHARD,  // all of it among the ranks of the axis dp_shard, with copies along dp_replicate
};

// Whether ranks keep parts of gradients.
constexpr bool cuts_gradients(ShardingStrategy strategy) {
  return strategy >= ShardingStrategy::SHARD_GRAD_OP;
}
// Whether ranks keep parts of parameters.
constexpr bool cuts_parameters(ShardingStrategy strategy) {
  return strategy >= ShardingStrategy::FULL_SHARD;
}

}  // namespace lockstep
