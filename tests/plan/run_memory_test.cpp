// The memory of a config, and the changes that would make it fit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/sgd/plain/options.h>
#include <lockstep/train/preflight/memory_fit.h>

#include "tests/base/errors.h"

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::int64_t kMiB = 1 << 20;

TrainConfig config() {
  TrainConfig config;
  config.data.sequence_length = 128;
  config.batch.global = 16;
  return config;
}

RunMemory plan_of(const TrainConfig& config, plan::Device device = plan::Device::cpu) {
  return RunMemory(
      config,
      {.family = "gpt2", .vocab_size = 256, .hidden_size = 256, .num_layers = 8, .num_heads = 4},
      device);
}

TEST(RunMemory, OfRanksThatShareAModelIsRefusedRatherThanWrong) {
  for (const auto axis :
       {&ParallelSection::tensor, &ParallelSection::pipeline, &ParallelSection::context}) {
    TrainConfig shared = config();
    shared.parallel.*axis = 2;
    EXPECT_THAT(usage_error([&] { plan_of(shared); }),
                HasSubstr("what ranks that share a model take in memory is not known here"));
  }
}

TEST(RunMemory, FollowsTheConfig) {
  TrainConfig changed = config();
  const std::int64_t plain = plan_of(changed).estimate(plan_of(changed).configured(2)).peak;
  const auto peak = [&] {
    RunMemory plan = plan_of(changed);
    return plan.estimate(plan.configured(2)).peak;
  };
  changed.recomputed_blocks = 1;
  EXPECT_LT(peak(), plain);
  changed = config();
  changed.optimizer.options = optim::SGDOptions{};
  EXPECT_LT(peak(), plain);
  changed = config();
  changed.batch.accumulation = 8;
  EXPECT_LT(peak(), plain);
  changed = config();
  changed.sharding.strategy = ShardingStrategy::FULL_SHARD;
  const std::int64_t full = peak();
  EXPECT_LT(full, plain);
  changed.sharding.max_live_units = 6;
  EXPECT_GT(peak(), full);
  changed.sharding = {.strategy = ShardingStrategy::HYBRID_SHARD, .ranks_per_copy = 1};
  EXPECT_GT(peak(), full);
}

TEST(RunMemory, IsSmallerBatchesOnMoreRanks) {
  RunMemory plan = plan_of(config());
  EXPECT_EQ(plan.configured(1).micro_batch, 16);
  EXPECT_EQ(plan.configured(4).micro_batch, 4);
  EXPECT_LT(plan.estimate(plan.configured(4)).activations,
            plan.estimate(plan.configured(1)).activations / 3);
  EXPECT_EQ(plan.configured(3).micro_batch, 6) << "what the ranks with most of it have";
  TrainConfig odd = config();
  odd.sharding = {.strategy = ShardingStrategy::HYBRID_SHARD, .ranks_per_copy = 3};
  EXPECT_THAT(usage_error([&] { plan_of(odd).configured(4); }), HasSubstr("ranks_per_copy is 3"));
  odd.sharding = {.strategy = ShardingStrategy::FULL_SHARD,
                  .zero_plus_plus = {.hpz_partition_size = 3}};
  EXPECT_THAT(usage_error([&] { plan_of(odd).configured(4); }), HasSubstr("partition_size is 3"));
}

// Each suggested change makes the run fit, and without it the run would not fit.
TEST(RunMemory, WaysToFit) {
  RunMemory plan = plan_of(config());
  const auto choice = plan.configured(2);
  const std::int64_t peak = plan.estimate(choice).peak;
  EXPECT_THAT(
      plan.ways_to_fit(choice, {.bytes = peak - 1}),
      ElementsAre(HasSubstr("\"SHARD_OPTIMIZER\""), HasSubstr("activation_checkpointing.ratio 1"),
                  HasSubstr("train_micro_batch_size_per_gpu 1 with 8")));
  const auto hard = plan.ways_to_fit(choice, {.bytes = peak / 3});
  EXPECT_THAT(hard, AllOf(Not(IsEmpty()), Each(AllOf(HasSubstr("\"FULL_SHARD\""),
                                                     HasSubstr("activation_checkpointing")))));

  // If all of these are set already, more ranks help, as long as each has memory of its own.
  TrainConfig frugal = config();
  frugal.batch = {.global = {}, .micro = 1, .accumulation = 1};
  frugal.sharding.strategy = ShardingStrategy::FULL_SHARD;
  frugal.recomputed_blocks = 1;
  plan = plan_of(frugal);
  const std::int64_t least = plan.estimate(plan.configured(2)).peak;
  EXPECT_THAT(plan.ways_to_fit(plan.configured(2), {.bytes = least - 1}),
              ElementsAre(HasSubstr("4 ranks")));
  EXPECT_THAT(
      plan.ways_to_fit(plan.configured(2), {.bytes = 2 * least - 2, .num_ranks_sharing = 2}),
      IsEmpty());
}

// On a GPU, moving state to the host is a suggestion, too.
TEST(RunMemory, OffloadIsAWayToFit) {
  TrainConfig frugal = config();
  frugal.batch = {.global = {}, .micro = 1, .accumulation = 1};
  frugal.sharding.strategy = ShardingStrategy::FULL_SHARD;
  frugal.recomputed_blocks = 1;
  RunMemory plan = plan_of(frugal, plan::Device::gpu);
  const auto choice = plan.configured(1);
  const std::int64_t peak = plan.estimate(choice).peak;
  EXPECT_THAT(plan.ways_to_fit(choice, {.bytes = peak - 1}),
              ElementsAre(HasSubstr("offload_optimizer.device \"cpu\"")));
  EXPECT_THAT(plan.ways_to_fit(choice, {.bytes = peak - 1, .host_bytes = kMiB}),
              Each(Not(HasSubstr("offload"))));
  EXPECT_THAT(plan_of(frugal).ways_to_fit(choice, {.bytes = peak / 2}),
              Each(Not(HasSubstr("offload"))));

  // A strategy with nothing to offload must cut first.
  frugal.sharding.strategy = ShardingStrategy::NO_SHARD;
  plan = plan_of(frugal, plan::Device::gpu);
  EXPECT_THAT(plan.ways_to_fit(plan.configured(1), {.bytes = peak - 1}),
              ElementsAre(AllOf(HasSubstr("\"SHARD_GRAD_OP\""), HasSubstr("offload"))));
}

TEST(RunMemory, OfTheHostIsJudgedWhereItIsUsed) {
  TrainConfig offloaded = config();
  offloaded.sharding = {.strategy = ShardingStrategy::FULL_SHARD,
                        .offload_optimizer = OffloadDevice::cpu};
  RunMemory plan = plan_of(offloaded, plan::Device::gpu);
  const auto choice = plan.configured(2);
  const std::int64_t peak = plan.estimate(choice).peak;
  const std::int64_t host = plan.estimate(choice).host();
  EXPECT_GT(host, 0);
  const auto there = [&](std::int64_t host_bytes) {
    return MemoryThere{.bytes = 2 * peak, .host_bytes = host_bytes, .num_ranks_on_host = 2};
  };
  EXPECT_EQ(judge_memory(plan, choice, there(2 * host)), "");
  EXPECT_THAT(usage_error([&] { judge_memory(plan, choice, there(2 * host - 2)); }),
              AllOf(HasSubstr("this host's 2 ranks"), HasSubstr("offload_optimizer")));
}

// Ranks share the writing of a checkpoint, whatever the strategy: 12 bytes for each parameter.
TEST(RunMemory, HasTheCopiesOfWhatIsSaved) {
  TrainConfig saved = config();
  saved.checkpoint = {.interval = 0};
  const auto estimate = [&](plan::Device device, int num_ranks) {
    RunMemory plan = plan_of(saved, device);
    return plan.estimate(plan.configured(num_ranks));
  };
  const std::int64_t share = 12 * models::num_parameters(plan_of(saved).model()) / 4;
  const std::int64_t plain = estimate(plan::Device::cpu, 4).peak;
  EXPECT_EQ(estimate(plan::Device::cpu, 4).copies, 0) << "the last one is written as it is";
  saved.checkpoint.interval = 10;
  EXPECT_EQ(estimate(plan::Device::cpu, 4).copies, share);
  EXPECT_EQ(estimate(plan::Device::cpu, 4).peak, plain + share);
  EXPECT_EQ(estimate(plan::Device::cpu, 4).host(), 0);
  saved.checkpoint.asynchronous = false;
  EXPECT_EQ(estimate(plan::Device::cpu, 4).peak, plain);

  saved.checkpoint.memory_interval = 1;
  EXPECT_EQ(estimate(plan::Device::cpu, 4).copies, 4 * share);
  EXPECT_EQ(estimate(plan::Device::cpu, 1).copies, 2 * 4 * share) << "there is no neighbour";
  saved.sharding.strategy = ShardingStrategy::FULL_SHARD;
  EXPECT_EQ(estimate(plan::Device::cpu, 4).copies, 4 * share);
  saved.checkpoint.asynchronous = true;
  EXPECT_EQ(estimate(plan::Device::gpu, 4).host_copies, 5 * share);
  EXPECT_EQ(estimate(plan::Device::gpu, 4).copies, 0);
  EXPECT_EQ(estimate(plan::Device::gpu, 4).host(), 5 * share);
}

TEST(RunMemory, IsJudgedBeforeTraining) {
  TrainConfig unsaved = config();
  // a checkpoint would take more on a single rank than on each of two
  unsaved.checkpoint.interval = 0;
  RunMemory plan = plan_of(unsaved);
  const auto choice = plan.configured(2);
  const std::int64_t peak = plan.estimate(choice).peak;
  EXPECT_EQ(judge_memory(plan, choice, {.bytes = 2 * peak}), "");
  EXPECT_EQ(judge_memory(plan, choice, {.bytes = 0}), "");
  EXPECT_THAT(judge_memory(plan, choice, {.bytes = peak + kMiB, .what = "a GPU"}),
              AllOf(HasSubstr("tightly"), HasSubstr("a GPU has"), HasSubstr("MiB")));
  EXPECT_THAT(judge_memory(plan, choice, {.bytes = 2 * peak + kMiB, .num_ranks_sharing = 2}),
              HasSubstr("for 2 of them"));
  const auto refusal = [&](const MemoryThere& there) {
    return usage_error([&] { judge_memory(plan, choice, there); });
  };
  EXPECT_THAT(refusal({.bytes = peak - kMiB, .what = "a GPU"}),
              AllOf(HasSubstr("NO_SHARD"), HasSubstr("each of 2 ranks"), HasSubstr("a GPU has"),
                    HasSubstr("What would fit: sharding_strategy \"SHARD_OPTIMIZER\""),
                    HasSubstr("model.hidden_size (it is 256)")));
  EXPECT_THAT(refusal({.bytes = kMiB, .num_ranks_sharing = 2}),
              AllOf(HasSubstr("No other way"), Not(HasSubstr("fewer ranks"))));
  EXPECT_THAT(refusal({.bytes = peak + kMiB, .num_ranks_sharing = 2}),
              HasSubstr("or start fewer ranks here"));
}

}  // namespace
}  // namespace lockstep::train
