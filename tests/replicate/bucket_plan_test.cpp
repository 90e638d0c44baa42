#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/replicate/options.h>

namespace lockstep::replicate {
namespace {

using ::testing::ElementsAre;
using Members = std::vector<std::size_t>;

constexpr BucketLimits kLimits = {.first_bytes = 10, .bytes = 100};

TEST(BucketPlan, FirstBucketIsSmall) {
  const GradientSize sizes[] = {{8}, {8}, {50}, {50}, {50}};
  const std::size_t order[] = {0, 1, 2, 3, 4};
  EXPECT_THAT(plan_buckets(sizes, order, kLimits),
              ElementsAre(Members{0}, Members{1, 2}, Members{3, 4}));
}

TEST(BucketPlan, FollowsTheOrder) {
  const GradientSize sizes[] = {{5}, {5}, {60}};
  const std::size_t order[] = {2, 0, 1};
  EXPECT_THAT(plan_buckets(sizes, order, kLimits), ElementsAre(Members{2}, Members{0, 1}));
}

TEST(BucketPlan, ALargeGradientTravelsAlone) {
  const GradientSize sizes[] = {{1}, {1000}, {1}};
  const std::size_t order[] = {0, 1, 2};
  EXPECT_THAT(plan_buckets(sizes, order, kLimits), ElementsAre(Members{0}, Members{1}, Members{2}));
}

TEST(BucketPlan, KindsDoNotMix) {
  const GradientSize sizes[] = {{4, 0}, {4, 1}, {4, 0}, {4, 1}};
  const std::size_t order[] = {0, 1, 2, 3};
  EXPECT_THAT(plan_buckets(sizes, order, kLimits), ElementsAre(Members{0, 2}, Members{1, 3}));
}

TEST(BucketPlan, EmptyGradientsHaveABucketToo) {
  const GradientSize sizes[] = {{0}};
  const std::size_t order[] = {0};
  EXPECT_THAT(plan_buckets(sizes, order, kLimits), ElementsAre(Members{0}));
  EXPECT_TRUE(plan_buckets({}, {}, kLimits).empty());
}

}  // namespace
}  // namespace lockstep::replicate
