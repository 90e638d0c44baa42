#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/configs.h"

namespace lockstep::train {

TEST(ShardingKeys, stages_of_deepspeed_are_strategies) {
  const ShardingStrategy strategies[] = {
      ShardingStrategy::NO_SHARD, ShardingStrategy::SHARD_OPTIMIZER,
      ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::FULL_SHARD};
  for (int stage = 0; stage < 4; ++stage)
    EXPECT_EQ(config_with({{"/zero_optimization/stage", stage}}).sharding.strategy,
              strategies[stage]);
  EXPECT_EQ(config_with({}).sharding.strategy, ShardingStrategy::NO_SHARD);
}

TEST(ShardingKeys, strategies_have_the_names_of_pytorch) {
  EXPECT_EQ(config_with({{"/sharding_strategy", "NO_SHARD"}}).sharding.strategy,
            ShardingStrategy::NO_SHARD);
  EXPECT_EQ(config_with({{"/sharding_strategy", "SHARD_GRAD_OP"}}).sharding.strategy,
            ShardingStrategy::SHARD_GRAD_OP);
  EXPECT_EQ(config_with({{"/sharding_strategy", "FULL_SHARD"}}).sharding.strategy,
            ShardingStrategy::FULL_SHARD);
  const TrainConfig hybrid =
      config_with({{"/sharding_strategy", "HYBRID_SHARD"}, {"/fsdp/ranks_per_copy", 4}});
  EXPECT_EQ(hybrid.sharding.strategy, ShardingStrategy::HYBRID_SHARD);
  EXPECT_EQ(hybrid.sharding.ranks_per_copy, 4);
  EXPECT_EQ(mistake_with({{"/sharding_strategy", "FULL_SHRAD"}}),
            "gpt.json:1: sharding_strategy is \"FULL_SHRAD\": it must be 'NO_SHARD', "
            "'SHARD_OPTIMIZER', 'SHARD_GRAD_OP', 'FULL_SHARD' or 'HYBRID_SHARD'");
}

TEST(ShardingKeys, both_ways_of_saying_it_must_say_the_same) {
  EXPECT_EQ(config_with({{"/sharding_strategy", "FULL_SHARD"}, {"/zero_optimization/stage", 3}})
                .sharding.strategy,
            ShardingStrategy::FULL_SHARD);
  EXPECT_EQ(mistake_with({{"/sharding_strategy", "FULL_SHARD"}, {"/zero_optimization/stage", 1}}),
            "gpt.json:1: zero_optimization.stage is 1, but sharding_strategy is \"FULL_SHARD\": "
            "set one of them");
}

TEST(ShardingKeys, copies_are_of_hybrid_shards_only) {
  EXPECT_EQ(mistake_with({{"/sharding_strategy", "FULL_SHARD"}, {"/fsdp/ranks_per_copy", 2}}),
            "gpt.json:1: fsdp.ranks_per_copy is 2, but only the sharding_strategy "
            "\"HYBRID_SHARD\" has several copies of the model: set that, or remove it");
}

}  // namespace lockstep::train
