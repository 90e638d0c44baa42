#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/adamw/plain/options.h>
#include <lockstep/plan/memory_estimate.h>

namespace lockstep::plan {
namespace {

using enum ShardingStrategy;
using Kind = StepTrace::Kind;

constexpr std::int64_t kUnit = 1 << 20;  // elements
constexpr std::int64_t kPsi = 8 * kUnit;

// Eight units of one parameter each, read forwards and backwards.
ModelSizes model() {
  ModelSizes sizes;
  for (std::size_t i = 0; i < 8; ++i) {
    sizes.units.push_back({.num_elements = kUnit});
    sizes.parameters.push_back({.num_elements = kUnit, .unit = i});
  }
  sizes.buffer_bytes = 1000;
  return sizes;
}

// Activations peak in the middle, when no gradient has come yet.
StepTrace trace(std::int64_t activations = 100) {
  StepTrace trace;
  for (std::size_t i = 0; i < 8; ++i) trace.events.push_back({Kind::use, i, 0});
  trace.events.push_back({Kind::use, 7, activations});
  for (std::size_t i = 8; i-- > 0;) {
    trace.events.push_back({Kind::use, i, 0});
    trace.events.push_back({Kind::gradient, i, 0});
  }
  return trace;
}

MemoryEstimate of(const MemoryOptions& options, std::int64_t activations = 100) {
  return estimate_memory(model(), trace(activations), options);
}

TEST(MemoryEstimate, CutsWhatTheStrategyCuts) {
  constexpr int kRanks = 4;
  struct Case {
    ShardingStrategy strategy;
    std::int64_t weights, gradients, optimizer;
  };
  for (const auto& [strategy, weights, gradients, optimizer] :
       {Case{NO_SHARD, 4 * kPsi, 4 * kPsi, 8 * kPsi},
        Case{SHARD_OPTIMIZER, 4 * kPsi, 4 * kPsi, 8 * kPsi / kRanks},
        Case{SHARD_GRAD_OP, 4 * kPsi, 4 * kPsi / kRanks, 8 * kPsi / kRanks},
        Case{FULL_SHARD, 4 * kPsi / kRanks, 4 * kPsi / kRanks, 8 * kPsi / kRanks}}) {
    const MemoryEstimate estimate = of({.strategy = strategy, .num_ranks = kRanks});
    EXPECT_EQ(estimate.weights, weights) << name_of(strategy);
    EXPECT_EQ(estimate.gradients, gradients) << name_of(strategy);
    EXPECT_EQ(estimate.optimizer, optimizer) << name_of(strategy);
    EXPECT_EQ(estimate.buffers, 1000);
    EXPECT_EQ(estimate.activations, 100);
  }
}

TEST(MemoryEstimate, HoldsAFewUnitsInFlight) {
  for (const std::int64_t live : {1, 2, 3, 5}) {
    const auto estimate = of({.strategy = FULL_SHARD, .num_ranks = 4, .max_live_units = live});
    EXPECT_EQ(estimate.gathered, live * 4 * kUnit);
  }
  EXPECT_EQ(of({.strategy = FULL_SHARD, .num_ranks = 4}).gradients_on_their_way, 2 * 4 * kUnit);
  EXPECT_EQ(of({.strategy = SHARD_GRAD_OP, .num_ranks = 4}).gathered, 0);
  EXPECT_EQ(of({.strategy = SHARD_OPTIMIZER, .num_ranks = 4}).gradients_on_their_way, 0);
}

TEST(MemoryEstimate, IsWhatIsThereAtOnce) {
  // Gradients come when activations have been freed, unless there were some before.
  constexpr std::int64_t kMany = 100 * kPsi;
  EXPECT_EQ(of({}).peak, 16 * kPsi + 1000);
  EXPECT_EQ(of({}, kMany).peak, 12 * kPsi + 1000 + kMany);
  EXPECT_EQ(of({.accumulation = 2}, kMany).peak, 16 * kPsi + 1000 + kMany);
  EXPECT_EQ(of({.device = Device::gpu}, kMany).peak, 16 * kPsi + 1000 + kMany);
  const auto full = of({.strategy = FULL_SHARD, .num_ranks = 8}, kMany);
  EXPECT_EQ(full.peak, 16 * kPsi / 8 + 4 * 4 * kUnit + 1000 + kMany);
}

TEST(MemoryEstimate, AddsPassesIntoShardsUnlessTheyAreExchangedAtTheEnd) {
  constexpr std::int64_t kMany = 100 * kPsi;
  using enum ExchangeGradients;
  MemoryOptions options{.strategy = FULL_SHARD, .num_ranks = 8};
  const auto one_pass = of(options, kMany);
  options.accumulation = 2;
  const auto into_shards = of(options, kMany);
  EXPECT_EQ(into_shards.gradients, one_pass.gradients);
  // Parts of two units that arrive.
  EXPECT_EQ(into_shards.peak, one_pass.peak + 2 * 4 * kUnit / 8);
  options.exchange_gradients = last_pass;
  EXPECT_EQ(of(options, kMany).gradients, one_pass.gradients + 4 * kPsi);
  EXPECT_EQ(of(options, kMany).peak, one_pass.peak + 4 * kPsi);
  // Where all ranks have whole gradients, the sums of the passes before are set aside.
  const auto ddp = of({.accumulation = 2}, kMany);
  const auto each = of({.accumulation = 2, .exchange_gradients = each_pass}, kMany);
  EXPECT_EQ(each.gradients, ddp.gradients + 4 * kPsi);
  EXPECT_EQ(each.peak, ddp.peak);
}

TEST(MemoryEstimate, HasNoWeightsInFp32WhereTheConfigSaysSo) {
  MemoryOptions options{.strategy = FULL_SHARD, .num_ranks = 8, .precision = Precision::bf16};
  const auto with_fp32 = of(options);
  EXPECT_EQ(with_fp32.weights + with_fp32.gradients + with_fp32.optimizer, 18 * kPsi / 8);
  options.narrow_masters = true;
  const auto without = of(options);
  EXPECT_EQ(without.weights, 2 * kPsi / 8);
  EXPECT_EQ(without.gradients, 2 * kPsi / 8);
  EXPECT_EQ(without.optimizer, 8 * kPsi / 8);
  options.narrow_states = true;
  EXPECT_EQ(of(options).optimizer, 4 * kPsi / 8);
  // Where weights are whole on every rank, they are the model's own.
  EXPECT_EQ(of({.precision = Precision::bf16, .narrow_masters = true}).optimizer, 8 * kPsi);
}

TEST(MemoryEstimate, OfAHybridIsThatOfOneCopy) {
  const auto hybrid = of({.strategy = HYBRID_SHARD, .num_ranks = 16, .ranks_per_copy = 4});
  const auto full = of({.strategy = FULL_SHARD, .num_ranks = 4});
  EXPECT_EQ(hybrid.peak, full.peak);
  EXPECT_EQ(hybrid.weights, full.weights);
}

TEST(MemoryEstimate, LeavesFrozenParametersWithoutState) {
  ModelSizes sizes = model();
  for (std::size_t i = 0; i < 6; ++i) sizes.units[i].trained = false;
  const auto estimate = estimate_memory(sizes, trace(), {});
  EXPECT_EQ(estimate.weights, 4 * kPsi);
  EXPECT_EQ(estimate.gradients, 4 * kPsi / 4);
  EXPECT_EQ(estimate.optimizer, 8 * kPsi / 4);
}

TEST(MemoryEstimate, HasTheDirectionsOfAStepWithNorms) {
  const MemoryOptions lamb{.step_kind = optim::StepKind::norm_per_parameter};
  EXPECT_EQ(of(lamb).step, 4 * kPsi);  // fewer elements than are taken at once
  EXPECT_EQ(of(lamb).peak, of({}).peak + 4 * kPsi);
  EXPECT_EQ(of(lamb, 100 * kPsi).peak, of({}, 100 * kPsi).peak);  // activations have gone then
  MemoryOptions cut = lamb;
  cut.strategy = FULL_SHARD;
  cut.num_ranks = 4;
  EXPECT_EQ(of(cut).step, 4 * kUnit / 4);  // one unit at a time
  cut.offload = Offload::optimizer;
  cut.device = Device::gpu;
  EXPECT_EQ(of(cut).step, 0);
  EXPECT_EQ(of(cut).host_optimizer, (8 + 4 + 4) * kPsi / 4 + 4 * kUnit / 4);
}

TEST(MemoryEstimate, HasMomentsOfEightBits) {
  const optim::OptimizerOptions eight = optim::AdamW8bitOptions{};
  MemoryOptions options{.state_bytes = eight.state_bytes(),
                        .step_kind = eight.kind(),
                        .saved_state_bytes = eight.saved_state_bytes()};
  const auto whole = estimate_memory(model(), trace(), options);
  EXPECT_EQ(whole.optimizer, kPsi * 65 / 32);
  EXPECT_EQ(whole.step, estimate_memory(model(), trace(), {}).step);
  options.strategy = FULL_SHARD;
  options.num_ranks = 4;
  EXPECT_EQ(estimate_memory(model(), trace(), options).optimizer, whole.optimizer / 4);
  // Copies in memory are of what a checkpoint has.
  options.copied_shares = 1;
  MemoryOptions floats = options;
  floats.state_bytes = 8;
  floats.saved_state_bytes = {};
  EXPECT_EQ(estimate_memory(model(), trace(), options).copies,
            estimate_memory(model(), trace(), floats).copies);
}

TEST(MemoryEstimate, HasTheMatricesOfAStep) {
  ModelSizes sizes = model();
  for (std::size_t i = 0; i < 6; ++i)
    sizes.parameters[i].matrix_rows = 1024;  // and as many columns
  const MemoryOptions muon{.step_kind = optim::StepKind::whole_matrices, .matrix_state_bytes = 4};
  const auto whole = estimate_memory(sizes, trace(), muon);
  EXPECT_EQ(whole.optimizer, (6 * 4 + 2 * 8) * kUnit);
  EXPECT_EQ(whole.step, 4 * (2 + 2) * kUnit);
  MemoryOptions cut = muon;
  cut.strategy = FULL_SHARD;
  cut.num_ranks = 4;
  const auto parts = estimate_memory(sizes, trace(), cut);
  EXPECT_EQ(parts.optimizer, whole.optimizer / 4);
  EXPECT_EQ(parts.step, 4 * (3 + 2) * kUnit);
  // In one unit one rank has what takes more.
  for (auto& parameter : sizes.parameters) parameter.unit = 0;
  sizes.units = {{.num_elements = kPsi}};
  cut.strategy = SHARD_OPTIMIZER;
  EXPECT_EQ(estimate_memory(sizes, trace(), cut).optimizer, 2 * 8 * kUnit);
}

TEST(MemoryEstimate, OfSixteenBitsOnAGpu) {
  // Autocast's copies come in addition to the weights.
  const auto whole = of({.precision = Precision::bf16, .device = Device::gpu});
  EXPECT_EQ(whole.weights, (4 + 2) * kPsi);
  EXPECT_EQ(whole.gradients, 4 * kPsi);
  EXPECT_EQ(whole.optimizer, 8 * kPsi);
  const auto full = of({.strategy = FULL_SHARD,
                        .num_ranks = 8,
                        .precision = Precision::bf16,
                        .device = Device::gpu});
  EXPECT_EQ(full.weights, 2 * kPsi / 8);
  EXPECT_EQ(full.gradients, 4 * kPsi / 8);  // summed in fp32
  EXPECT_EQ(full.optimizer, 12 * kPsi / 8);
  EXPECT_EQ(full.gathered, 2 * 2 * kUnit);
}

TEST(MemoryEstimate, OfSixteenBitsOnACpu) {
  const auto whole = of({.precision = Precision::bf16});
  EXPECT_EQ(whole.peak, of({}).peak);
  const auto full = of({.strategy = FULL_SHARD, .num_ranks = 8, .precision = Precision::bf16});
  EXPECT_EQ(full.weights, 2 * kPsi / 8);
  EXPECT_EQ(full.optimizer, 12 * kPsi / 8);
  EXPECT_EQ(full.gathered, 2 * 4 * kUnit + 2 * kUnit);
}

TEST(MemoryEstimate, OnTheHost) {
  const auto optimizer = of({.strategy = SHARD_GRAD_OP,
                             .num_ranks = 8,
                             .precision = Precision::bf16,
                             .offload = Offload::optimizer,
                             .device = Device::gpu});
  EXPECT_EQ(optimizer.optimizer, 0);
  EXPECT_EQ(optimizer.gradients, 0);
  EXPECT_EQ(optimizer.host(), 16 * kPsi / 8);
  const auto both = of({.strategy = FULL_SHARD,
                        .num_ranks = 8,
                        .precision = Precision::bf16,
                        .offload = Offload::optimizer_and_parameters,
                        .device = Device::gpu});
  EXPECT_EQ(both.weights, 0);
  EXPECT_EQ(both.host(), 18 * kPsi / 8);
}

TEST(MemoryEstimate, RefusesNonsense) {
  EXPECT_THROW(of({.num_ranks = 0}), UsageError);
  EXPECT_THROW(of({.strategy = HYBRID_SHARD, .num_ranks = 6, .ranks_per_copy = 4}), UsageError);
  EXPECT_THROW(of({.max_live_units = 0}), UsageError);
  EXPECT_THROW(of({.accumulation = 0}), UsageError);
  EXPECT_THROW(of({.offload = Offload::optimizer_and_parameters}), UsageError);
  EXPECT_THROW(of({.strategy = ShardingStrategy::SHARD_OPTIMIZER, .offload = Offload::optimizer}),
               UsageError);
}

}  // namespace
}  // namespace lockstep::plan
