// Losses that are not finite.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <iterator>

#include "training.h"

namespace lockstep::train::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A training that diverges within a few steps.
struct BadTraining : Training {
  explicit BadTraining(const std::string& optimizer = "SGD", double weight_decay = 0) {
    config.erase("scheduler");
    set("/optimizer",
        {{"type", optimizer}, {"params", {{"lr", 1000}, {"weight_decay", weight_decay}}}});
    set("/gradient_clipping", 0);
    // On a GPU the host learns a step's result while it is at the next step.
    if (std::getenv("LOCKSTEP_TEST_NEEDS_GPU") != nullptr) set("/device", "cuda");
  }
};

TEST(NonFinite, StopsAllRanksAndSaysItOnce) {
  BadTraining training;
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 3) << run.error();
  EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
  const std::string text = run.error();
  EXPECT_EQ(count(text, "training stopped at step"), 1) << text;
  EXPECT_EQ(std::ssize(launch::testing::lines_of(text)), 1 + count(text, "ranks share 1 GPU"))
      << text;
  // On a GPU, attention's gradients stop being numbers before its results do.
  EXPECT_THAT(text, AnyOf(HasSubstr("the loss is nan"), HasSubstr("the gradient norm nan")));
  for (const char* part :
       {"smaller learning rate (it was 1000)", "gradient_clipping", "on_non_finite_loss"})
    EXPECT_THAT(text, HasSubstr(part));
  const auto losses = training.losses();
  EXPECT_THAT(text, HasSubstr("step " + std::to_string(losses.size() + 1) + ":"));
  for (const auto& [step, loss] : losses) EXPECT_TRUE(std::isfinite(loss)) << step;
  EXPECT_TRUE(std::filesystem::exists(training.output() / "loss.svg")) << "to look at";
  EXPECT_TRUE(training.checkpoint().empty()) << "nothing to go on from by itself";
}

void expect_skips(BadTraining training) {
  training.set("/on_non_finite_loss", "skip").set("/max_steps", 8);
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 0) << run.error();
  const auto losses = training.losses();
  const auto norms = training.metric("gradient_norm");
  ASSERT_EQ(losses.size(), 8u);
  ASSERT_EQ(norms.size(), 8u);
  int skipped = 0;
  for (const auto& [step, loss] : losses) {
    const std::string words = "step " + std::to_string(step) + " was skipped on all ranks: ";
    const bool due = !std::isfinite(loss) || !std::isfinite(norms.at(step));
    EXPECT_EQ(count(run.output(), words), due ? 1 : 0) << words;
    skipped += due ? 1 : 0;
  }
  EXPECT_GT(skipped, 1);
  EXPECT_THAT(run.output(), HasSubstr(std::to_string(skipped) + " of the steps were skipped"));
  EXPECT_THAT(run.output(), Not(HasSubstr("-nan")));
}

TEST(NonFinite, SkipsAndSaysWhichSteps) { expect_skips(BadTraining()); }

TEST(NonFinite, SkipsStepsOfAdamWs) { expect_skips(BadTraining("AdamW", 1000)); }

// A checkpoint and a validation are due after each step, but the bad step gets neither.
TEST(NonFinite, NothingIsSavedOfTheStepThatStopsARun) {
  BadTraining training("AdamW", 1000);
  training.set("/checkpoint/interval", 1).set("/validation/interval", 1);
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 3) << run.error();
  const auto good = training.losses().size();
  EXPECT_THAT(run.error(), HasSubstr("training stopped at step " + std::to_string(good + 1) + ":"));
  const std::string last = training.checkpoint().filename().string();
  EXPECT_TRUE(last.ends_with(std::to_string(good))) << last << " after " << good << " good steps";
}

TEST(NonFinite, SkippingEndsWhereNothingElseIsLeft) {
  BadTraining training;
  training.set("/on_non_finite_loss", "skip").set("/max_steps", 200);
  Launched run = training.start(1);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 3) << run.error();
  EXPECT_THAT(run.error(), HasSubstr("and the 20 steps before it were skipped"));
  EXPECT_THAT(run.error(), Not(HasSubstr("\"skip\"")));
  EXPECT_TRUE(training.checkpoint().empty());
}

}  // namespace
}  // namespace lockstep::train::testing
