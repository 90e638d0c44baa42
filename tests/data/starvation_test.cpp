#include <lockstep/data/sampling/prefetcher.h>

#include <gtest/gtest.h>

namespace lockstep::data {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

TEST(Starvation, IsTheShareOfTheLastSteps) {
  StarvationMeter meter;
  EXPECT_EQ(meter.share(), 0);
  meter.step(milliseconds(10), milliseconds(40));
  EXPECT_DOUBLE_EQ(meter.share(), 0.25);
  meter.step(milliseconds(0), milliseconds(60));
  EXPECT_DOUBLE_EQ(meter.share(), 0.1);
  for (std::size_t i = 0; i < StarvationMeter::most_steps; ++i)
    meter.step(milliseconds(30), milliseconds(40));
  EXPECT_DOUBLE_EQ(meter.share(), 0.75);
}

TEST(Starvation, IsSaidOnceAndOnlyAfterEnoughSteps) {
  StarvationMeter meter;
  for (std::size_t i = 1; i < StarvationMeter::least_steps; ++i) {
    meter.step(milliseconds(30), milliseconds(100));
    EXPECT_FALSE(meter.should_warn());
  }
  meter.step(milliseconds(30), milliseconds(100));
  EXPECT_TRUE(meter.should_warn());
  EXPECT_FALSE(meter.should_warn());
}

TEST(Starvation, ALittleWaitingIsNotWorthAWord) {
  StarvationMeter little;
  StarvationMeter short_steps;
  for (int i = 0; i < 100; ++i) {
    little.step(milliseconds(19), milliseconds(100));
    short_steps.step(microseconds(50), microseconds(100));
  }
  EXPECT_FALSE(little.should_warn());
  EXPECT_FALSE(short_steps.should_warn());
}

TEST(Starvation, ASlowStartIsForgotten) {
  StarvationMeter meter;
  meter.step(milliseconds(60000), milliseconds(60000));
  for (std::size_t i = 0; i < StarvationMeter::most_steps; ++i)
    meter.step(milliseconds(0), milliseconds(100));
  EXPECT_EQ(meter.share(), 0);
}

}  // namespace
}  // namespace lockstep::data
