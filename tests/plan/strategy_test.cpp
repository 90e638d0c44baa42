// The table of sharding strategies: every name is a config's word and every stage DeepSpeed's.
#include <set>

#include <gtest/gtest.h>

#include <lockstep/parallel/shard/sizes/strategy.h>
#include <lockstep/train/config/config.h>

namespace lockstep {
namespace {

ShardingStrategy strategy_in(const std::string& setting) {
  const std::string config = R"({"model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4},
      "data": {"train": "input.txt", "sequence_length": 32}, "train_batch_size": 8,
      "max_steps": 10, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, )" +
                             setting + "}";
  return train::parse_config(config, {.name = "c", .folder = "."}).sharding.strategy;
}

TEST(Strategy, EveryNameIsAConfigsWord) {
  std::set<std::string> names;
  for (const StrategyTraits& row : kStrategies) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_STREQ(name_of(row.strategy), row.name);
    EXPECT_EQ(strategy_in("\"sharding_strategy\": \"" + std::string(row.name) + "\""),
              row.strategy);
  }
}

TEST(Strategy, StagesAreDeepSpeeds) {
  const ShardingStrategy stages[] = {ShardingStrategy::NO_SHARD, ShardingStrategy::SHARD_OPTIMIZER,
                                     ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::FULL_SHARD};
  ASSERT_EQ(kLastStage, 3);
  for (std::int64_t stage = 0; stage <= kLastStage; ++stage) {
    EXPECT_EQ(strategy_of_stage(stage), stages[stage]);
    EXPECT_EQ(strategy_in("\"zero_optimization\": {\"stage\": " + std::to_string(stage) + "}"),
              stages[stage]);
  }
}

TEST(Strategy, EachCutIncludesTheOnesBefore) {
  for (const StrategyTraits& row : kStrategies) {
    EXPECT_LE(cuts_parameters(row.strategy), cuts_gradients(row.strategy)) << row.name;
    EXPECT_LE(cuts_gradients(row.strategy), cuts_optimizer(row.strategy)) << row.name;
  }
  EXPECT_FALSE(cuts_optimizer(ShardingStrategy::NO_SHARD));
  EXPECT_TRUE(cuts_parameters(ShardingStrategy::HYBRID_SHARD));
}

TEST(Strategy, IsListedInMessages) {
  EXPECT_EQ(strategies_that_cut(ShardedState::parameters), "FULL_SHARD or HYBRID_SHARD");
  EXPECT_EQ(config_words_that_cut(ShardedState::gradients),
            "\"SHARD_GRAD_OP\" (zero_optimization.stage 2), \"FULL_SHARD\" (3) or "
            "\"HYBRID_SHARD\"");
}

}  // namespace
}  // namespace lockstep
