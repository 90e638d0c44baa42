#include <gtest/gtest.h>

#include <lockstep/observe/progress_bar.h>

namespace lockstep::observe {
namespace {

using std::chrono::seconds;

const Clock::time_point kBegin{seconds(1000)};

TEST(Throughput, IsExactFromTheFirstAmountOnWhereTheRateIsConstant) {
  Throughput rate(seconds(30));
  rate.start(kBegin);
  EXPECT_EQ(rate.per_second(), 0);
  for (int i = 1; i <= 100; ++i) {
    rate.add(50, kBegin + i * milliseconds(250));
    ASSERT_NEAR(rate.per_second(), 200, 1e-9);
  }
}

TEST(Throughput, FollowsAChangeWithinItsMemory) {
  Throughput rate(seconds(10));
  rate.start(kBegin);
  auto now = kBegin;
  for (int i = 0; i < 600; ++i) rate.add(10, now += milliseconds(100));
  EXPECT_NEAR(rate.per_second(), 100, 1e-9);
  for (int i = 0; i < 300; ++i) rate.add(20, now += milliseconds(100));
  // After three times the memory, exp(-3) of the old rate is left.
  EXPECT_NEAR(rate.per_second(), 200 - 100 * std::exp(-3), 1);
}

TEST(Throughput, APauseCanBeLeftOut) {
  Throughput rate(seconds(10));
  rate.start(kBegin);
  rate.add(100, kBegin + seconds(1));
  rate.start(kBegin + seconds(500));
  rate.add(100, kBegin + seconds(501));
  EXPECT_NEAR(rate.per_second(), 100, 1e-9);
}

TEST(Throughput, ATimeThatDoesNotAdvanceIsNoDivisionByZero) {
  Throughput rate(seconds(10));
  rate.start(kBegin);
  rate.add(100, kBegin);
  EXPECT_EQ(rate.per_second(), 0);
  rate.add(100, kBegin + seconds(1));
  EXPECT_GT(rate.per_second(), 0);
}

}  // namespace
}  // namespace lockstep::observe
