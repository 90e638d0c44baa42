#include <gmock/gmock.h>

#include <cstdlib>

#include "training.h"

namespace lockstep::train::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Gt;
using ::testing::Lt;
using ::testing::Pair;
using ::testing::SizeIs;

// Rounding to 8 bits moves a loss of 5 by less than that.
constexpr double kRounding = 0.03;

TEST(OnGpu, LossesInBf16AreThoseOfTheCpuInFp32AndMetricsHaveMemoryAndShareOfPeak) {
  if (std::getenv("LOCKSTEP_TEST_NEEDS_GPU") == nullptr) GTEST_SKIP() << "no GPU here";
  Training training;
  training.set("/max_steps", 20);
  training.train(1, "cpu");
  const auto expected = training.losses("cpu");
  ASSERT_THAT(expected, SizeIs(20));
  training.set("/device", "cuda").set("/bf16/enabled", true);
  for (const char* stage : {"0", "3"}) {
    SCOPED_TRACE(stage);
    training.set("/zero_optimization/stage", std::atoi(stage));
    training.train(1, stage);
    const auto losses = training.losses(stage);
    ASSERT_THAT(losses, SizeIs(20));
    for (const auto& [step, loss] : losses)
      EXPECT_NEAR(loss, expected.at(step), kRounding) << "step " << step;
    EXPECT_THAT(training.metric("memory_gib", stage), Each(Pair(Gt(0), Gt(0.0))));
    EXPECT_THAT(training.metric("mfu", stage), Each(Pair(Gt(0), AllOf(Gt(0.0), Lt(1.0)))));
  }
}

}  // namespace
}  // namespace lockstep::train::testing
