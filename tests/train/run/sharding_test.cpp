// Sharding changes where a run's state is kept, and nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "training.h"

namespace lockstep::train::testing {
namespace {

using ::testing::HasSubstr;

const char* const kStrategies[] = {"SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD"};

TEST(Sharding, HasTheWeightsOfARunWithoutItToTheBit) {
  Training training;
  training.set("/model/dropout", 0.1).set("/gradient_accumulation_steps", 2);
  // The default of shards, but not of the others.
  training.set("/exchange_gradients", "each_pass");
  training.train(2, "whole");
  for (const char* strategy : kStrategies) {
    training.set("/sharding_strategy", strategy);
    training.train(2, strategy);
    EXPECT_EQ(training.losses(strategy), training.losses("whole")) << strategy;
    EXPECT_TRUE(training.weights(strategy) == training.weights("whole")) << strategy;
  }
}

TEST(Sharding, WithBlocksThatBackwardComputesAgain) {
  Training training;
  training.set("/model/dropout", 0.1);
  training.train(2, "whole");
  training.set("/sharding_strategy", "FULL_SHARD").set("/activation_checkpointing/ratio", 1);
  training.train(2, "recomputed");
  EXPECT_EQ(training.losses("recomputed"), training.losses("whole"));
  EXPECT_TRUE(training.weights("recomputed") == training.weights("whole"));
}

TEST(Sharding, OfACopyForEveryTwoRanks) {
  Training training;
  training.train(4, "whole");
  training.set("/sharding_strategy", "HYBRID_SHARD").set("/fsdp/ranks_per_copy", 2);
  training.train(4, "hybrid");
  EXPECT_TRUE(training.weights("hybrid") == training.weights("whole"));
}

// One of 76 sequences is left for the last step of an epoch, so two ranks have none.
TEST(Sharding, RanksWithoutSamplesTakePart) {
  Training training;
  training.config.erase("max_steps");
  training.set("/epochs", 2).set("/train_batch_size", 75);
  training.set("/scheduler/params/warmup_num_steps", 1);
  training.train(3, "whole");
  ASSERT_EQ(training.losses("whole").size(), 4u);
  training.set("/sharding_strategy", "FULL_SHARD");
  training.train(3, "sharded");
  EXPECT_EQ(training.losses("sharded"), training.losses("whole"));
  EXPECT_TRUE(training.weights("sharded") == training.weights("whole"));
}

TEST(Sharding, ARunGoesOnInAnotherLayout) {
  Training training;
  training.set("/scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 2}}}});
  training.train(2, "whole");
  training.set("/max_steps", 4).set("/zero_optimization/stage", 3);
  training.train(2);
  training.set("/max_steps", 8).set("/zero_optimization/stage", 1);
  training.train(2);
  training.set("/max_steps", 12).set("/zero_optimization/stage", 2);
  training.train(2);
  EXPECT_EQ(training.losses(), training.losses("whole"));
  EXPECT_TRUE(training.weights() == training.weights("whole"));
}

TEST(Sharding, IntoGroupsThatRanksDoNotDivideIntoIsRefusedBeforeAnyStarts) {
  Training training;
  training.set("/sharding_strategy", "HYBRID_SHARD").set("/fsdp/ranks_per_copy", 3);
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 2);
  EXPECT_THAT(run.error(), HasSubstr("fsdp.ranks_per_copy is 3, and 2 ranks do not divide into "
                                     "groups of so many"));
}

}  // namespace
}  // namespace lockstep::train::testing
