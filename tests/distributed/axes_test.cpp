#include <lockstep/distributed/make_parallel.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/distributed/axes/job_axes.h>
#include <lockstep/distributed/config_rules.h>

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Axes = std::vector<mesh::Axis>;

constexpr JobRanks kOneHost = {.world = 4, .of_host = 4};

DistributedConfig sharded(ShardingStrategy strategy, Axes mesh = {}) {
  DistributedConfig config;
  config.mode = ParallelMode::FSDP;
  config.sharding_strategy = strategy;
  config.mesh = std::move(mesh);
  return config;
}

TEST(Axes, WhereNoneAreGivenSpanAllRanks) {
  EXPECT_EQ(axes_for(DistributedConfig{}, kOneHost).axes, (Axes{{"dp_replicate", -1}}));
  EXPECT_EQ(axes_for(sharded(ShardingStrategy::FULL_SHARD), kOneHost).axes,
            (Axes{{"dp_shard", -1}}));
  EXPECT_EQ(axes_for(sharded(ShardingStrategy::SHARD_OPTIMIZER), kOneHost).axes,
            (Axes{{"dp_replicate", -1}}));
}

TEST(Axes, OfHybridShardsAreACopyOnEachHost) {
  EXPECT_EQ(axes_for(sharded(ShardingStrategy::HYBRID_SHARD), kOneHost).axes,
            (Axes{{"dp_replicate", -1}, {"dp_shard", 4}}));
  // The ranks of a host that have samples of their own share a copy, whether or not stages share
  // the host.
  DistributedConfig config = sharded(ShardingStrategy::HYBRID_SHARD);
  config.model_parallel = {.tensor = 2, .pipeline = 2};
  EXPECT_EQ(axes_for(config, {.world = 8, .of_host = 8}).axes,
            (Axes{{"pp", 2}, {"dp_replicate", -1}, {"dp_shard", 2}, {"tp", 2}}));
  EXPECT_EQ(axes_for(config, {.world = 24, .of_host = 8}).axes,
            (Axes{{"pp", 2}, {"dp_replicate", -1}, {"dp_shard", 2}, {"tp", 2}}));
  EXPECT_EQ(axes_for(config, {.world = 32, .of_host = 4}).axes,
            (Axes{{"pp", 2}, {"dp_replicate", -1}, {"dp_shard", 2}, {"tp", 2}}));
}

TEST(Axes, OfAModeAloneSpanAllRanks) {
  const auto axes = [](const DistributedConfig& config) {
    check(config);
    return axes_for(sized_for(config, 4), kOneHost).axes;
  };
  EXPECT_EQ(axes({.mode = ParallelMode::TENSOR}), (Axes{{"dp_replicate", -1}, {"tp", 4}}));
  EXPECT_EQ(axes({.mode = ParallelMode::PIPELINE}), (Axes{{"pp", 4}, {"dp_replicate", -1}}));
  EXPECT_EQ(axes({.mode = ParallelMode::CONTEXT}), (Axes{{"dp_replicate", -1}, {"cp", 4}}));
  EXPECT_EQ(axes({.mode = ParallelMode::TENSOR,
                  .sharding_strategy = ShardingStrategy::FULL_SHARD,
                  .model_parallel = {.tensor = 2}}),
            (Axes{{"dp_shard", -1}, {"tp", 2}}));
  EXPECT_EQ(axes({.mode = ParallelMode::HYBRID, .model_parallel = {.tensor = 2, .context = 2}}),
            (Axes{{"dp_replicate", -1}, {"cp", 2}, {"tp", 2}}));
}

TEST(Axes, OfSeveralKindsAreHybrid) {
  EXPECT_THAT(
      [] { check({.mode = ParallelMode::TENSOR, .model_parallel = {.tensor = 2, .pipeline = 3}}); },
      ThrowsMessage<UsageError>(HasSubstr("tensor 2 × pipeline 3 × context 1: set .mode = "
                                          "ParallelMode::HYBRID")));
}

// "or make it …" names the nearest sizes that are possible.
TEST(Axes, ThatRanksDoNotDivideIntoComeWithTheNearestThatTheyDo) {
  const auto refusal = [](const ModelParallelSizes& sizes, int num_ranks, const char* text) {
    EXPECT_THAT(([&] {
                  axes_for({.mode = ParallelMode::HYBRID, .model_parallel = sizes},
                           {.world = num_ranks, .of_host = num_ranks});
                }),
                ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  refusal({.tensor = 2, .pipeline = 3}, 4,
          "tensor 2 × pipeline 3 × context 1, which is 6 ranks for each share of the data, and 4 "
          "ranks do not divide into groups of so many: start 6, or make it tensor 2 × pipeline 2 × "
          "context 1");
  refusal({.tensor = 3}, 8, "start 6 or 9, or make it tensor 2 × pipeline 1 × context 1");
  refusal({.tensor = 2, .context = 3}, 8,
          "start 6 or 12, or make it tensor 2 × pipeline 1 × "
          "context 2");
  const auto odd = [](const ModelParallelSizes& sizes) { return sizes.tensor % 2 == 1; };
  EXPECT_EQ(to_text(nearest_sizes({.tensor = 4, .pipeline = 2}, 6, odd)),
            "tensor 3 × pipeline 2 × context 1");
}

TEST(HostCrossing, IsWhereAGroupOfAnAxisIsOnSeveralHosts) {
  const mesh::MeshShape shape({{"dp_replicate", 2}, {"tp", 4}}, 8);
  EXPECT_FALSE(host_crossing(shape, "tp", {0, 0, 0, 0, 1, 1, 1, 1}));
  const auto all = host_crossing(shape, "dp_replicate", {0, 0, 0, 0, 1, 1, 1, 1});
  ASSERT_TRUE(all);
  EXPECT_EQ(all->num_groups, 4);
  EXPECT_EQ(all->inside, 2);
  EXPECT_EQ(to_text(*all), "ranks 0 of host 0 with 4 of host 1");
  const auto uneven = host_crossing(shape, "tp", {0, 0, 0, 0, 1, 1, 1, 2});
  ASSERT_TRUE(uneven);
  EXPECT_EQ(uneven->num_groups, 1);
  EXPECT_EQ(uneven->inside, 1);
  EXPECT_EQ(to_text(*uneven), "ranks 4, 5, 6 of host 1 with 7 of host 2");
}

TEST(Axes, ThatAStrategyLacksAreNamed) {
  EXPECT_THAT(
      [] {
        axes_for(sharded(ShardingStrategy::HYBRID_SHARD, {{"dp_shard", 4}}), kOneHost);
      },
      ThrowsMessage<UsageError>(HasSubstr("give it both dp_replicate and dp_shard")));
  EXPECT_THAT(
      [] {
        axes_for(sharded(ShardingStrategy::FULL_SHARD, {{"dp_replicate", 4}}), kOneHost);
      },
      ThrowsMessage<UsageError>(HasSubstr("give it dp_shard")));
}

TEST(Axes, ThatNoStrategyUsesAreRefused) {
  EXPECT_THAT(
      [] {
        axes_for(sharded(ShardingStrategy::FULL_SHARD, {{"tp", 4}}), kOneHost);
      },
      ThrowsMessage<UsageError>(HasSubstr("has an axis 'tp'")));
  EXPECT_THAT(
      [] {
        axes_for(sharded(ShardingStrategy::FULL_SHARD, {{"dp_replicate", 2}, {"dp_shard", 2}}),
                 kOneHost);
      },
      ThrowsMessage<UsageError>(HasSubstr("only HYBRID_SHARD uses both")));
}

TEST(Axes, OfRanksThatShareAModelLieAroundThoseOfData) {
  DistributedConfig config = sharded(ShardingStrategy::FULL_SHARD);
  config.model_parallel = {.tensor = 2, .pipeline = 3, .context = 4};
  const JobAxes job = axes_for(config, {.world = 24, .of_host = 24});
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
