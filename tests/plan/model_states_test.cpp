#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/plan/model_states.h>

namespace lockstep::plan {
namespace {

using enum ShardingStrategy;

double total(std::string_view precision, const ModelStateOptions& options = {}) {
  return estimate_memory(1e-9, precision, options).total();
}

// Bytes for each parameter, from Rajbhandari et al. (2020).
TEST(ModelStates, AreTheTextbooks) {
  EXPECT_DOUBLE_EQ(total("fp32"), 16);
  EXPECT_DOUBLE_EQ(total("bf16"), 16);
  EXPECT_DOUBLE_EQ(total("fp16"), 16);
  constexpr int kRanks = 64;
  const auto of = [&](std::string_view precision, ShardingStrategy strategy) {
    return total(precision, {.strategy = strategy, .num_ranks = kRanks});
  };
  for (const char* precision : {"fp16", "bf16"}) {
    EXPECT_DOUBLE_EQ(of(precision, NO_SHARD), 16);
    EXPECT_DOUBLE_EQ(of(precision, SHARD_OPTIMIZER), 4 + 12.0 / kRanks);
    EXPECT_DOUBLE_EQ(of(precision, SHARD_GRAD_OP), 2 + 14.0 / kRanks);
    EXPECT_DOUBLE_EQ(of(precision, FULL_SHARD), 16.0 / kRanks);
    EXPECT_DOUBLE_EQ(of(precision, HYBRID_SHARD), 16.0 / kRanks);
  }
  EXPECT_DOUBLE_EQ(of("fp32", SHARD_OPTIMIZER), 8 + 8.0 / kRanks);
  EXPECT_DOUBLE_EQ(of("fp32", SHARD_GRAD_OP), 4 + 12.0 / kRanks);
  EXPECT_DOUBLE_EQ(of("fp32", FULL_SHARD), 16.0 / kRanks);
}

TEST(ModelStates, OfSevenBillionParameters) {
  EXPECT_DOUBLE_EQ(estimate_memory(7, "bf16").total(), 112e9);
  for (const auto& [ranks, gigabytes] : {std::pair(1, 84.0), {2, 42.0}, {4, 21.0}, {8, 10.5}})
    EXPECT_DOUBLE_EQ(
        estimate_memory(
            7, "fp16",
            {.strategy = FULL_SHARD, .num_ranks = ranks, .master_weights = MasterWeights::none})
            .total(),
        gigabytes * 1e9);
}

TEST(ModelStates, OnTheHost) {
  const ModelStates optimizer = estimate_memory(
      1e-9, "bf16", {.strategy = SHARD_GRAD_OP, .num_ranks = 4, .offload = Offload::optimizer});
  EXPECT_DOUBLE_EQ(optimizer.host, 3);
  EXPECT_DOUBLE_EQ(optimizer.total(), 2.5);
  const ModelStates both = estimate_memory(
      1e-9, "bf16",
      {.strategy = FULL_SHARD, .num_ranks = 4, .offload = Offload::optimizer_and_parameters});
  EXPECT_DOUBLE_EQ(both.host, 3.5);
  EXPECT_DOUBLE_EQ(both.total(), 0.5);
}

TEST(ModelStates, RefuseNonsense) {
  for (const double wrong : {0.0, -7.0, std::nan(""), std::numeric_limits<double>::infinity()})
    EXPECT_THROW(estimate_memory(wrong, "bf16"), UsageError);
  EXPECT_THROW(estimate_memory(7, "fp17"), UsageError);
  EXPECT_THROW(estimate_memory(7, "bf16", {.num_ranks = 0}), UsageError);
}

}  // namespace
}  // namespace lockstep::plan
