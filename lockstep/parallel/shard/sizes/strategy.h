// Sharding strategies: what is cut among ranks. A new one is a row of the table below, and is made
// in distributed/make_parallel.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace lockstep {

// Training gives the same result with each of them.
enum class ShardingStrategy {
  NO_SHARD,         // nothing: as DDP
  SHARD_OPTIMIZER,  // the optimizer's state: ZeRO-1
  SHARD_GRAD_OP,    // and gradients: ZeRO-2
  FULL_SHARD,       // and parameters: ZeRO-3
  HYBRID_SHARD,  // all of it among the ranks of the axis dp_shard, with copies along dp_replicate
};

// The state that ranks hold parts of. Each value includes those before it.
enum class ShardedState { nothing, optimizer, gradients, parameters };

struct StrategyTraits {
  ShardingStrategy strategy;
  // In configs, commands and messages. The names are PyTorch's, which has none for ZeRO-1.
  const char* name;
  ShardedState cut;
  const char* cut_text;  // the same in words, for messages
  std::int64_t stage;    // DeepSpeed's zero_optimization.stage; the first row of a stage is meant
  bool has_copies;       // groups of ranks hold a copy of the model each
};

// In the order of the enumeration.
inline constexpr std::array<StrategyTraits, 5> kStrategies{{
    {ShardingStrategy::NO_SHARD, "NO_SHARD", ShardedState::nothing, "", 0, false},
    {ShardingStrategy::SHARD_OPTIMIZER, "SHARD_OPTIMIZER", ShardedState::optimizer,
     "the optimizer's state", 1, false},
    {ShardingStrategy::SHARD_GRAD_OP, "SHARD_GRAD_OP", ShardedState::gradients,
     "gradients and the optimizer's state", 2, false},
    {ShardingStrategy::FULL_SHARD, "FULL_SHARD", ShardedState::parameters,
     "parameters, gradients and the optimizer's state", 3, false},
    {ShardingStrategy::HYBRID_SHARD, "HYBRID_SHARD", ShardedState::parameters,
     "parameters, gradients and the optimizer's state", 3, true},
}};

constexpr const StrategyTraits& traits_of(ShardingStrategy strategy) {
  return kStrategies[static_cast<std::size_t>(strategy)];
}

constexpr const char* name_of(ShardingStrategy strategy) { return traits_of(strategy).name; }

// Whether ranks keep parts of the optimizer's state.
constexpr bool cuts_optimizer(ShardingStrategy strategy) {
  return traits_of(strategy).cut >= ShardedState::optimizer;
}
// Whether ranks keep parts of gradients.
constexpr bool cuts_gradients(ShardingStrategy strategy) {
  return traits_of(strategy).cut >= ShardedState::gradients;
}
// Whether ranks keep parts of parameters.
constexpr bool cuts_parameters(ShardingStrategy strategy) {
  return traits_of(strategy).cut >= ShardedState::parameters;
}
// Whether groups of ranks hold a copy of the model each.
constexpr bool has_copies(ShardingStrategy strategy) { return traits_of(strategy).has_copies; }

// When the gradients of a step of several passes are exchanged. This is also their order of
// addition, in which they are rounded: over the ranks and then over the passes, or over each rank's
// passes and then over the ranks.
enum class ExchangeGradients : std::uint8_t {
  automatic,  // after each pass where gradients are cut among the ranks, elsewhere after the last
  each_pass,  // between passes a rank has sums over all ranks: its part, where gradients are cut
  last_pass,  // between passes a rank has the whole gradients of its own: one exchange a step
};

// As in a config.
constexpr const char* name_of(ExchangeGradients when) {
  switch (when) {
    case ExchangeGradients::automatic: return "auto";
    case ExchangeGradients::each_pass: return "each_pass";
    case ExchangeGradients::last_pass: return "last_pass";
  }
  return "";
}

constexpr bool exchanges_each_pass(ExchangeGradients when, ShardingStrategy strategy) {
  return when == ExchangeGradients::automatic ? cuts_gradients(strategy)
                                              : when == ExchangeGradients::each_pass;
}

// The strategies that cut at least this, for messages: "FULL_SHARD or HYBRID_SHARD".
std::string strategies_that_cut(ShardedState least);

// The same in a config's words: "\"FULL_SHARD\" (zero_optimization.stage 3) or \"HYBRID_SHARD\"".
std::string config_words_that_cut(ShardedState least);

// The strategy of a stage from 0 to kLastStage.
constexpr ShardingStrategy strategy_of_stage(std::int64_t stage) {
  for (const StrategyTraits& row : kStrategies)
    if (row.stage == stage) return row.strategy;
  return ShardingStrategy::NO_SHARD;
}
inline constexpr std::int64_t kLastStage = kStrategies.back().stage;

}  // namespace lockstep
