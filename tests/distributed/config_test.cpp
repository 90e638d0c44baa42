#include <lockstep/distributed/distributed.h>

#include <type_traits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/distributed/config_rules.h>

#include "../base/errors.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

DistributedConfig with(ShardingStrategy strategy, const shard::Options& options) {
  DistributedConfig config;
  config.mode = ParallelMode::FSDP;
  config.sharding_strategy = strategy;
  config.fsdp = options;
  return config;
}

const shard::Options kHalf = {.mixed_precision = {.param_dtype = c10::kHalf}};
const shard::Options kHalfGradients = {.mixed_precision = {.reduce_dtype = c10::kHalf}};
const shard::Options kOffload = {.cpu_offload = {.offload_optimizer = true}};
const shard::Options kInt8 = {.zero_plus_plus = {.quantize_weights = true}};
const shard::Options kNodes = {.zero_plus_plus = {.hierarchical_partition = 2}};

TEST(Config, StrategiesThatCutGradientsHaveEveryOption) {
  for (const auto strategy : {ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::FULL_SHARD,
                              ShardingStrategy::HYBRID_SHARD})
    for (const shard::Options& options : {kHalf, kHalfGradients, kOffload, kInt8, kNodes})
      EXPECT_NO_THROW(check(with(strategy, options)));
}

TEST(Config, WhatAStrategyWithWholeGradientsDoesNotHaveIsRefused) {
  for (const auto strategy : {ShardingStrategy::NO_SHARD, ShardingStrategy::SHARD_OPTIMIZER}) {
    EXPECT_NO_THROW(check(with(strategy, {})));
    for (const shard::Options& options : {kHalf, kHalfGradients})
      EXPECT_THAT(usage_error([&] { check(with(strategy, options)); }),
                  AllOf(HasSubstr("fsdp.mixed_precision is set, but with "),
                        HasSubstr("SHARD_GRAD_OP, FULL_SHARD or HYBRID_SHARD"),
                        HasSubstr("lockstep::autocast around the forward")));
    EXPECT_THAT(usage_error([&] { check(with(strategy, kOffload)); }),
                HasSubstr("fsdp.cpu_offload is set, but with "));
    for (const shard::Options& options : {kInt8, kNodes})
      EXPECT_THAT(usage_error([&] { check(with(strategy, options)); }),
                  HasSubstr("fsdp.zero_plus_plus is set, but with "));
  }
}

TEST(Config, AStrategyNeedsItsMode) {
  EXPECT_THAT(usage_error([] { check({.sharding_strategy = ShardingStrategy::SHARD_OPTIMIZER}); }),
              HasSubstr("ParallelMode::FSDP"));
  check({.sharding_strategy = ShardingStrategy::NO_SHARD});
  EXPECT_EQ(strategy_of({.mode = ParallelMode::FSDP}), ShardingStrategy::FULL_SHARD);
}

TEST(Config, ChecksOfConsistencyAreSoManyExchangesApart) {
  EXPECT_THAT(usage_error([] { check({.consistency_check_interval = -1}); }),
              HasSubstr("consistency_check_interval is -1"));
  check({.consistency_check_interval = 0});
}

TEST(Config, IsCheckedBeforeTheJobIsJoined) {
  DistributedConfig ddp;
  ddp.fsdp = kHalf;
  EXPECT_THAT(usage_error([&] { setup_distributed(ddp); }), HasSubstr("but with DDP every rank"));
}

TEST(Config, TypesAndPlacesThatMakeNoSenseAreRefusedAtOnce) {
  EXPECT_THAT(
      usage_error([] {
        check(with(ShardingStrategy::FULL_SHARD, {.mixed_precision = {.param_dtype = c10::kInt}}));
      }),
      HasSubstr("param_dtype of Int"));
  EXPECT_THAT(
      usage_error([] {
        check(with(ShardingStrategy::FULL_SHARD, {.cpu_offload = {.offload_params = true}}));
      }),
      HasSubstr("set offload_optimizer as well"));
}

// Users of PyTorch look for these names.
static_assert(std::is_same_v<MixedPrecision, shard::MixedPrecision>);
static_assert(std::is_same_v<CPUOffload, shard::CPUOffload>);
static_assert(std::is_same_v<ZeroPlusPlusConfig, shard::ZeroPlusPlusConfig>);
static_assert(std::is_same_v<GradScaler, optim::GradScaler>);
static_assert(std::is_same_v<autocast, device::Autocast>);

}  // namespace
}  // namespace lockstep
