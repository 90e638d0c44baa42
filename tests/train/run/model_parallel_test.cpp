// Ranks that share a model, in any way, train what one rank trains.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/files.h"
#include "training.h"

namespace lockstep::train::testing {
namespace {

using lockstep::testing::read_file;
using nlohmann::json;
using ::testing::AnyOf;
using ::testing::HasSubstr;

void expect_same_losses(const Training& training, const std::string& run,
                        const std::string& wanted) {
  const auto got = training.losses(run);
  const auto all = training.losses(wanted);
  ASSERT_EQ(got.size(), all.size()) << run;
  for (const auto& [step, loss] : all)
    EXPECT_NEAR(got.at(step), loss, 2e-5 * loss) << run << ", step " << step;
}

TEST(ModelParallel, HasTheLossesOfOneRank) {
  Training training;
  // The last step of an epoch has fewer sequences than the ranks share evenly.
  training.set("/model/num_layers", 4).set("/model/dropout", 0.1);
  training.set("/train_batch_size", 8);
  training.train(1, "one");
  const std::vector<std::pair<std::string, json>> layouts = {
      {"tensor", {{"tensor", 2}, {"sequence_parallel", true}}},
      {"context", {{"context", 2}}},
      {"pipeline", {{"pipeline", 2}, {"schedule", "zb-v"}}},
      {"shards of a pipeline of tensors",
       {{"pipeline", 2}, {"tensor", 2}, {"sharding_strategy", "FULL_SHARD"}}}};
  for (const auto& [name, parallel] : layouts) {
    training.set("/parallel", parallel);
    const bool pipelined = parallel.contains("pipeline");
    const bool all = parallel.contains("sharding_strategy");
    training.set("/train_micro_batch_size_per_gpu", pipelined ? 2 : 8);
    training.train(all ? 8 : 2, name);
    expect_same_losses(training, name, "one");
  }
}

TEST(ModelParallel, ARunGoesOnInAnotherLayout) {
  Training training;
  training.set("/scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 2}}}});
  training.set("/train_batch_size", 8).set("/train_micro_batch_size_per_gpu", 4);
  training.set("/dataloader_drop_last", true);
  training.train(1, "one");
  training.set("/max_steps", 4).set("/parallel", {{"pipeline", 2}});
  training.train(2);
  training.set("/max_steps", 8).set("/parallel", {{"tensor", 2}});
  training.train(2);
  training.set("/max_steps", 12).set("/parallel", json::object());
  training.train(1);
  expect_same_losses(training, "run", "one");
}

TEST(ModelParallel, ThatCannotBeIsRefusedBeforeAnyRankStarts) {
  Training training;
  const auto refusal = [&](int num_ranks, const json& parallel) {
    training.set("/parallel", parallel);
    Launched run = training.start(num_ranks);
    EXPECT_EQ(run.wait(milliseconds(60'000)), 2);
    return run.error();
  };
  EXPECT_THAT(refusal(3, {{"tensor", 2}}),
              HasSubstr("3 ranks do not divide into groups of so many: start 2 or 4"));
  // Mistakes that no number of ranks would mend come first, and the advice is possible.
  EXPECT_THAT(refusal(4, {{"tensor", 3}}), HasSubstr("heads cannot be shared by 3 ranks"));
  EXPECT_THAT(refusal(3, {{"pipeline", 2}}),
              HasSubstr("start 2 or 4, or make it tensor 1 × pipeline 1 × context 1"));
  EXPECT_THAT(refusal(1, {{"data", 2}, {"tensor", 1}}), HasSubstr("and there is 1: set data to 1"));
  EXPECT_THAT(refusal(2, {{"data", 2}, {"tensor", 2}}), HasSubstr("which is 4 ranks, and there are "
                                                                  "2"));
  EXPECT_THAT(refusal(16, {{"pipeline", 16}}), HasSubstr("of which each stage needs one"));
  EXPECT_THAT(refusal(3, {{"tensor", 3}}), HasSubstr("heads cannot be shared by 3 ranks"));
  EXPECT_THAT(refusal(3, {{"context", 3}}), HasSubstr("make it a multiple of 6"));
  EXPECT_THAT(refusal(2, {{"pipeline", 2}, {"stage_layers", {1, 1, 1}}}),
              HasSubstr("has 3 numbers, and the schedule has 2 stages"));
  EXPECT_THAT(refusal(2, {{"pipeline", 2}, {"stage_layers", {1, 9}}}),
              HasSubstr("is [1, 9], which is 10 layers, and the model has"));
  EXPECT_THAT(refusal(2, {{"pipeline", 2}, {"timeline_step", 1000}}),
              HasSubstr("timeline_step is 1000, and the run has"));
}

// The schedule is read from a file, stages have different sizes, and the timeline is drawn.
TEST(ModelParallel, APipelineCanBeGivenItsScheduleAndItsStages) {
  Training training;
  training.set("/model/num_layers", 4).set("/max_steps", 6);
  training.set("/train_batch_size", 8).set("/dataloader_drop_last", true);
  training.train(1, "one");
  training.set("/train_micro_batch_size_per_gpu", 2);
  const std::string file = (training.folder() / "mine.json").string();
  Launched written({LOCKSTEP_PROGRAM, "plan", "schedule", "--kind", "zb-h1", "--stages", "2",
                    "--micro-batches", "4", "--write", file});
  ASSERT_EQ(written.wait(), 0) << written.error();
  training.set(
      "/parallel",
      {{"pipeline", 2}, {"schedule_file", file}, {"stage_layers", {3, 1}}, {"timeline_step", 2}});
  Launched run = training.start(2, "given");
  ASSERT_EQ(run.wait(milliseconds(120'000)), 0) << run.error();
  expect_same_losses(training, "given", "one");
  // The picture shows each rank and micro-batch as measured: forward, and both halves of backward.
  // On a busy machine it is stretched, and leaves no room for letters.
  EXPECT_THAT(run.output(), AnyOf(HasSubstr("I backward (input), W backward (weights)"),
                                  HasSubstr("too much for a letter each")));
  EXPECT_THAT(read_file(training.output("given") / "timeline.svg"),
              HasSubstr("zb-h1, measured in step 2"));

  training.set("/parallel/stage_layers", nullptr).set("/parallel/balance", "time");
  training.train(2, "timed");
  expect_same_losses(training, "timed", "one");

  training.set("/parallel", {{"pipeline", 2}}).set("/train_micro_batch_size_per_gpu", 8);
  Launched idle = training.start(2, "idle");
  EXPECT_EQ(idle.wait(milliseconds(60'000)), 0) << idle.error();
  EXPECT_THAT(idle.output(), HasSubstr("2 stages have 1 micro-batch a step, and ranks are idle for "
                                       "50 % of it: more of them, by a larger "
                                       "gradient_accumulation_steps"));

  training.set("/parallel", {{"pipeline", 2}, {"schedule_file", file}, {"balance", "time"}});
  training.set("/train_micro_batch_size_per_gpu", 4);
  Launched other = training.start(2, "other");
  EXPECT_EQ(other.wait(milliseconds(60'000)), 2);
  EXPECT_THAT(other.error(), HasSubstr("a schedule of 4 micro-batches, and a step of this run has "
                                       "2: set gradient_accumulation_steps to 4"));
}

}  // namespace
}  // namespace lockstep::train::testing
