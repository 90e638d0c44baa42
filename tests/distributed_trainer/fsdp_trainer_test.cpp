#include <lockstep/train/distributed_trainer.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/loss.h>

#include <tests/ranks/job.h>

#include "../base/errors.h"
#include "line.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

const TrainerOptions kOptions = {.epochs = 3,
                                 .batch_size = 7,
                                 .optimizer = optim::SGDOptions{},
                                 .learning_rate = 0.1,
                                 .progress_fd = -1};

at::Tensor weight(DistributedManager& dist, const auto& model) {
  return dist.full_state_dict(model).at(0).tensor.cpu();
}

TEST(FSDPTrainer, JoinsTheJobAndTrainsAsADistributedTrainerDoes) {
  DistributedTrainer plain(setup_distributed(), Net(), kMean, kOptions);
  plain.fit(Line(20));
  FSDPTrainer trainer(Net(), kMean, kOptions);
  const TrainingResult result = trainer.fit(Line(20), Line(5));
  EXPECT_TRUE(result.validation_loss);
  EXPECT_EQ(trainer.dist().config().mode, ParallelMode::FSDP);
  EXPECT_TRUE(
      at::equal(weight(trainer.dist(), trainer.model()), plain.model()->layer->weight.cpu()));
}

TEST(FSDPTrainer, TakesAStrategyAndItsOptions) {
  FSDPTrainer trainer(Net(), torch::nn::MSELoss(), kOptions,
                      {.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP,
                       .fsdp = {.mixed_precision = {.param_dtype = at::kBFloat16}}});
  trainer.fit(Line(20));
  EXPECT_EQ(trainer.dist().config().fsdp.mixed_precision.param_dtype, at::kBFloat16);
}

// fp16 has a loss scale even if none was asked for. If the overflowing first step were an update,
// it would ruin the weights.
TEST(FSDPTrainer, InFp16SkipsStepsThatOverflow) {
  TrainerOptions options = kOptions;
  options.epochs = 10;
  // On a CPU gradients have 32 bits until they are sent.
  options.loss_scale =
      optim::LossScaleOptions{.initial_scale_power = at::hasCUDA() ? 20 : 127, .hysteresis = 1};
  FSDPTrainer trainer(Net(), kMean, options,
                      {.fsdp = {.mixed_precision = {.param_dtype = at::kHalf}}});
  const TrainingResult result = trainer.fit(Line(20));
  EXPECT_GT(result.skipped_steps, 0);
  EXPECT_LT(result.skipped_steps, 10);
  EXPECT_TRUE(std::isfinite(result.loss));
  EXPECT_TRUE(at::isfinite(weight(trainer.dist(), trainer.model())).all().item<bool>());
}

TEST(FSDPTrainer, RefusesAJobOfAnotherModeAndNamesIt) {
  for (const auto& [mode, name] :
       {std::pair(ParallelMode::DDP, "DDP"), std::pair(ParallelMode::TENSOR, "TENSOR"),
        std::pair(ParallelMode::HYBRID, "HYBRID")})
    EXPECT_THAT(usage_error([mode = mode] {
                  FSDPTrainer(setup_distributed({.mode = mode}), Net(), kMean, kOptions);
                }),
                HasSubstr("was given a job of " + std::string(name) + ": set the job up with"));
}

TEST(FSDPTrainer, AutocastIsForModelsThatAreNotCut) {
  TrainerOptions options = kOptions;
  options.autocast = at::kBFloat16;
  FSDPTrainer trainer(Net(), kMean, options);
  EXPECT_THAT(usage_error([&] { trainer.fit(Line(20)); }),
              HasSubstr("set DistributedConfig::fsdp.mixed_precision.param_dtype instead"));
}

// The digits of an operator's result show the type that it computed in; losses get results in 32
// bits.
TEST(DistributedTrainer, WithAutocastComputesInSixteenBitsOnWeightsOfThirtyTwo) {
  TrainerOptions options = kOptions;
  options.autocast = at::kBFloat16;
  int passes = 0;
  const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
    EXPECT_EQ(output.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(output, output.to(at::kBFloat16).to(at::kFloat)));
    ++passes;
    return kMean(output, target);
  };
  DistributedTrainer trainer(setup_distributed(), Net(), loss, options);
  trainer.fit(Line(20), Line(5));
  EXPECT_GT(passes, 9);
  EXPECT_EQ(trainer.model()->layer->weight.scalar_type(), at::kFloat);
  options.autocast = at::kInt;
  DistributedTrainer wrong(setup_distributed(), Net(), loss, options);
  EXPECT_THAT(usage_error([&] { wrong.fit(Line(20)); }), HasSubstr("BFloat16 and Half"));
}

TEST(FSDPTrainer, TwoRanks) { ranks::expect_cells_pass(2, {"--fsdp"}); }

}  // namespace
}  // namespace lockstep
