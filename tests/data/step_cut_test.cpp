#include <lockstep/data/sampling/distributed_sampler.h>

#include <limits>

#include <gtest/gtest.h>

namespace lockstep::data {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

TEST(StepCut, TheLastStepMayBeShort) {
  const StepCut cut{.samples_per_step = 8, .samples_per_batch = 4};
  EXPECT_EQ(cut.num_used(17), 17);
  EXPECT_EQ(cut.num_steps(17), 3);
  EXPECT_EQ(cut.num_batches(17), 5);
  EXPECT_EQ(cut.num_steps(16), 2);
  EXPECT_EQ(cut.num_batches(16), 4);
  EXPECT_EQ(cut.num_steps(0), 0);
}

TEST(StepCut, DropsWholeStepsOnly) {
  const StepCut cut{.samples_per_step = 8, .samples_per_batch = 4, .drop_last = true};
  EXPECT_EQ(cut.num_used(15), 8);
  EXPECT_EQ(cut.num_used(7), 0);
}

TEST(StepCut, ASampleIsAStepHoweverLargeAStepMayBe) {
  const StepCut cut{.samples_per_step = kMost, .samples_per_batch = 1};
  EXPECT_EQ(cut.num_steps(10), 1);
  EXPECT_EQ((StepCut{.samples_per_step = 20, .samples_per_batch = kMost}).num_batches(10), 1);
}

TEST(StepCut, TheLastBatchOfAStepHasWhatIsLeft) {
  const StepCut cut{.samples_per_step = 10, .samples_per_batch = 4};
  EXPECT_EQ(cut.batches_per_step(), 3);
  EXPECT_EQ(cut.num_batches(25), 8);
  std::int64_t next = 0;
  std::int64_t batch = 0;
  for (const std::int64_t size : {4, 4, 2, 4, 4, 2, 4, 1}) {
    EXPECT_EQ(cut.first_of(batch), next);
    EXPECT_EQ(cut.size_of(batch, 25), size);
    next += size;
    ++batch;
  }
  EXPECT_EQ(next, 25);
}

}  // namespace
}  // namespace lockstep::data
