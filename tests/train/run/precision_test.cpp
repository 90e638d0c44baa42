// Runs in 16 bits, and with their state in the host's memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "training.h"

namespace lockstep::train::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const char* const kThatCutGradients[] = {"SHARD_GRAD_OP", "FULL_SHARD"};

void expect_close(const std::map<int, double>& got, const std::map<int, double>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [step, loss] : wanted)
    EXPECT_NEAR(got.at(step), loss, 0.01 * loss) << "step " << step;
}

// A column of metrics.csv, of the rows for steps.
std::vector<double> column(const Training& training, const std::string& name,
                           const std::string& output = "run") {
  std::ifstream file(training.output(output) / "metrics.csv");
  std::string line, cell;
  std::getline(file, line);
  std::istringstream header(line);
  int wanted = -1;
  for (int i = 0; std::getline(header, cell, ','); ++i)
    if (cell == name) wanted = i;
  EXPECT_GE(wanted, 0) << "no column " << name << " in " << line;
  std::vector<double> values;
  while (wanted >= 0 && std::getline(file, line)) {
    std::istringstream cells(line);
    for (int i = 0; i <= wanted; ++i) std::getline(cells, cell, ',');
    if (!cell.empty()) values.push_back(std::stod(cell));
  }
  return values;
}

std::string trained(Training& training, int num_ranks, const std::string& output = "run") {
  Launched run = training.start(num_ranks, output);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 0) << run.output() << run.error();
  return run.output();
}

TEST(Precision, InBf16LossesAreCloseToThoseOfFp32) {
  Training training;
  training.train(2, "fp32");
  training.set("/bf16/enabled", true);
  for (const char* strategy : kThatCutGradients) {
    training.set("/sharding_strategy", strategy);
    const std::string said = trained(training, 2, strategy);
    expect_close(training.losses(strategy), training.losses("fp32"));
    EXPECT_NE(training.losses(strategy), training.losses("fp32")) << "nothing lost a digit";
    EXPECT_EQ(count(said, "on a CPU bf16 is what ranks send each other of parameters; operators "
                          "compute in fp32"),
              1)
        << said;
    EXPECT_THAT(said, HasSubstr(std::string(strategy) + ", bf16) on "));
  }
}

TEST(Precision, InFp16LossesAreCloseToThoseOfFp32) {
  Training training;
  training.set("/gradient_accumulation_steps", 2);
  training.train(2, "fp32");
  training.set("/fp16/enabled", true).set("/communication_data_type", "fp16");
  for (const char* strategy : kThatCutGradients) {
    training.set("/sharding_strategy", strategy);
    const std::string said = trained(training, 2, strategy);
    EXPECT_THAT(said, Not(HasSubstr("skipped"))) << "2^16 is a scale of means, not of sums";
    expect_close(training.losses(strategy), training.losses("fp32"));
    EXPECT_NE(training.losses(strategy), training.losses("fp32")) << "nothing lost a digit";
    EXPECT_EQ(column(training, "loss_scale", strategy), std::vector<double>(12, 65536));
  }
}

// The last stage scales the loss, and all stages skip a step that overflows in one of them.
TEST(Precision, StagesOfAPipelineTrainWithALossScale) {
  Training training;
  training.set("/gradient_accumulation_steps", 4);
  training.train(2, "fp32");
  training.set("/parallel", {{"pipeline", 2}}).set("/sharding_strategy", "SHARD_GRAD_OP");
  training.set("/communication_data_type", "fp16");
  trained(training, 4, "fp16 gradients");
  expect_close(training.losses("fp16 gradients"), training.losses("fp32"));
  EXPECT_NE(training.losses("fp16 gradients"), training.losses("fp32")) << "nothing lost a digit";
  EXPECT_EQ(column(training, "loss_scale", "fp16 gradients"), std::vector<double>(12, 65536));
  training.set("/fp16", {{"enabled", true}, {"initial_scale_power", 26}, {"hysteresis", 1}});
  training.set("/max_steps", 16);
  trained(training, 4, "too large a scale");
  const auto skipped = column(training, "skipped_steps", "too large a scale");
  ASSERT_EQ(skipped.size(), 16u);
  EXPECT_EQ(skipped.front(), 1) << "the first step fits";
  EXPECT_LT(skipped.back(), 12);
  const auto losses = training.losses("too large a scale");
  EXPECT_LT(losses.at(16), losses.at(1));
}

TEST(Precision, AScaleThatIsTooLargeSkipsTheFirstStepsOnAllRanksAndThenTrains) {
  for (const char* strategy : kThatCutGradients) {
    Training training;
    training.set("/sharding_strategy", strategy).set("/max_steps", 16);
    training.set("/fp16", {{"enabled", true}, {"initial_scale_power", 127}, {"hysteresis", 1}});
    const std::string said = trained(training, 2);
    const auto skipped = column(training, "skipped_steps");
    const auto scales = column(training, "loss_scale");
    ASSERT_EQ(skipped.size(), 16u);
    EXPECT_EQ(skipped.front(), 1) << "the first step fits";
    EXPECT_GT(skipped.back(), 0);
    EXPECT_LT(skipped.back(), 12);
    EXPECT_EQ(scales.front(), std::exp2(127));
    EXPECT_EQ(scales.back(), std::exp2(127 - skipped.back()));
    EXPECT_EQ(count(said, "was skipped on all ranks: gradients overflow at a loss scale of"),
              static_cast<int>(skipped.back()));
    const auto losses = training.losses();
    for (const auto& [step, loss] : losses) EXPECT_TRUE(std::isfinite(loss)) << step;
    EXPECT_LT(losses.at(16), losses.at(1));
    // The schedule does not advance either.
    const auto rates = column(training, "learning_rate");
    for (std::size_t i = 1; i < static_cast<std::size_t>(skipped.back()); ++i)
      EXPECT_EQ(rates[i], rates[0]) << i;
  }
}

TEST(Precision, AResumedRunHasItsScaleToTheBit) {
  for (const char* strategy : kThatCutGradients) {
    Training training;
    training.set("/sharding_strategy", strategy);
    training.set("/scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 2}}}});
    // The run overflows, finds its scale, and doubles it on both sides of the interruption.
    training.set("/fp16", {{"enabled", true},
                           {"initial_scale_power", 127},
                           {"hysteresis", 2},
                           {"loss_scale_window", 3}});
    training.set("/max_steps", 20);
    training.train(2, "whole");
    training.set("/max_steps", 11);
    training.train(2);
    training.set("/max_steps", 20);
    training.train(2);
    EXPECT_EQ(training.losses(), training.losses("whole"));
    EXPECT_EQ(column(training, "loss_scale"), column(training, "loss_scale", "whole"));
    EXPECT_EQ(column(training, "skipped_steps"), column(training, "skipped_steps", "whole"));
    EXPECT_EQ(training.weights(), training.weights("whole"));
  }
}

TEST(Precision, AFixedScaleThatNeverFitsEndsTheRun) {
  Training training;
  training.set("/sharding_strategy", "FULL_SHARD").set("/max_steps", 40);
  training.set("/fp16", {{"enabled", true}, {"loss_scale", 3e38}});
  training.set("/communication_data_type", "fp16");
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 3) << run.error();
  EXPECT_THAT(run.error(), HasSubstr("training stopped at step 21: its gradients overflow at the "
                                     "fixed loss scale of 3e+38"));
  EXPECT_EQ(training.losses().size(), 20u);
}

TEST(Precision, AScaleThatCannotBecomeSmallerEndsTheRun) {
  Training training;
  training.set("/sharding_strategy", "FULL_SHARD").set("/communication_data_type", "fp16");
  training.set("/fp16", {{"enabled", true},
                         {"initial_scale_power", 127},
                         {"hysteresis", 1},
                         {"min_loss_scale", 8e37}});
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 3) << run.error();
  EXPECT_THAT(run.error(), AllOf(HasSubstr("training stopped at step 3: gradients overflow at the "
                                           "smallest loss scale there may be"),
                                 HasSubstr("No checkpoint was written")));
}

TEST(Precision, OfWholeParametersChangesNothingOnACpuAndSaysSo) {
  Training training;
  training.train(2, "fp32");
  training.set("/zero_optimization/stage", 0).set("/bf16/enabled", true);
  EXPECT_EQ(count(trained(training, 2, "bf16"), "bf16 changes nothing on a CPU with NO_SHARD"), 1);
  EXPECT_EQ(training.weights("bf16"), training.weights("fp32"));
  training.set("/zero_optimization/stage", 1).set("/bf16/enabled", false);
  training.set("/fp16/enabled", true);
  EXPECT_EQ(
      count(trained(training, 2, "fp16"), "fp16 changes nothing on a CPU with SHARD_OPTIMIZER"), 1);
  EXPECT_EQ(training.weights("fp16"), training.weights("fp32"));
}

TEST(Precision, OffloadChangesNothingOnACpuAndSaysSo) {
  Training training;
  training.train(2, "fp32");
  training.set("/zero_optimization", {{"stage", 3},
                                      {"offload_optimizer", {{"device", "cpu"}}},
                                      {"offload_param", {{"device", "cpu"}}}});
  const std::string said = trained(training, 2);
  EXPECT_EQ(count(said, "offload changes nothing on a CPU"), 1) << said;
  EXPECT_EQ(training.weights(), training.weights("fp32"));
}

TEST(Precision, NodesThatRanksDoNotDivideIntoAreRefusedBeforeAnyStarts) {
  Training training;
  training.set("/zero_optimization", {{"stage", 3}, {"zero_hpz_partition_size", 3}});
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 2);
  EXPECT_THAT(run.error(), HasSubstr("zero_optimization.zero_hpz_partition_size is 3, and the 2 "
                                     "ranks that hold a copy of the model do not divide into nodes "
                                     "of so many"));
}

TEST(Precision, ARunMayGoOnInAnother) {
  Training training;
  training.set("/scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 2}}}});
  training.set("/max_steps", 4);
  training.train(2);
  training.set("/max_steps", 8).set("/sharding_strategy", "FULL_SHARD").set("/fp16/enabled", true);
  const std::string said = trained(training, 2);
  EXPECT_THAT(said, HasSubstr("the precision is fp16, was fp32"));
  EXPECT_EQ(training.losses().size(), 8u);
}

}  // namespace
}  // namespace lockstep::train::testing
