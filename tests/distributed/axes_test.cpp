#include <lockstep/distributed/parallel_model.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Axes = std::vector<mesh::Axis>;

DistributedConfig sharded(ShardingStrategy strategy, Axes mesh = {}) {
  DistributedConfig config;
  config.mode = ParallelMode::FSDP;
  config.sharding_strategy = strategy;
  config.mesh = std::move(mesh);
  return config;
}

TEST(Axes, WhereNoneAreGivenSpanAllRanks) {
  EXPECT_EQ(axes_for({}, 4).axes, (Axes{{"dp_replicate", -1}}));
  EXPECT_EQ(axes_for(sharded(ShardingStrategy::FULL_SHARD), 4).axes, (Axes{{"dp_shard", -1}}));
  EXPECT_EQ(axes_for(sharded(ShardingStrategy::SHARD_OPTIMIZER), 4).axes,
            (Axes{{"dp_replicate", -1}}));
}

TEST(Axes, OfHybridShardsAreACopyOnEachHost) {
  EXPECT_EQ(axes_for(sharded(ShardingStrategy::HYBRID_SHARD), 4).axes,
            (Axes{{"dp_replicate", -1}, {"dp_shard", 4}}));
}

TEST(Axes, ThatAStrategyLacksAreNamed) {
  EXPECT_THAT(
      [] {
        axes_for(sharded(ShardingStrategy::HYBRID_SHARD, {{"dp_shard", 4}}), 4);
      },
      ThrowsMessage<UsageError>(HasSubstr("give it both dp_replicate and dp_shard")));
  EXPECT_THAT(
      [] {
        axes_for(sharded(ShardingStrategy::FULL_SHARD, {{"dp_replicate", 4}}), 4);
      },
      ThrowsMessage<UsageError>(HasSubstr("give it dp_shard")));
}

TEST(Axes, ThatNoStrategyUsesAreRefused) {
  EXPECT_THAT(
      [] {
        axes_for(sharded(ShardingStrategy::FULL_SHARD, {{"tp", 4}}), 4);
      },
      ThrowsMessage<UsageError>(HasSubstr("has an axis 'tp'")));
  EXPECT_THAT(
      [] {
        axes_for(sharded(ShardingStrategy::FULL_SHARD, {{"dp_replicate", 2}, {"dp_shard", 2}}), 4);
      },
      ThrowsMessage<UsageError>(HasSubstr("only HYBRID_SHARD uses both")));
}

TEST(Axes, OfRanksThatShareAModelLieAroundThoseOfData) {
  DistributedConfig config = sharded(ShardingStrategy::FULL_SHARD);
  config.model_parallel = {.tensor = 2, .pipeline = 3, .context = 4};
  const JobAxes job = axes_for(config, 24);
  EXPECT_EQ(job.axes, (Axes{{"pp", 3}, {"dp_shard", -1}, {"cp", 4}, {"tp", 2}}));
  using Names = std::vector<std::string>;
  EXPECT_EQ(job.samples, (Names{"dp_shard"}));
  EXPECT_EQ(job.gradients, (Names{"dp_shard", "cp"}));
  EXPECT_EQ(job.shards, (Names{"dp_shard", "cp"}));
  EXPECT_EQ(job.model, (Names{"pp", "tp"}));
  EXPECT_EQ(joint_groups(job), (std::vector<Names>{{"dp_shard", "cp"}, {"pp", "tp"}}));
}

}  // namespace
}  // namespace lockstep
