#include <gtest/gtest.h>

#include <thread>

#include <lockstep/base/deadline.h>

namespace lockstep {
namespace {

using std::chrono::hours;
using std::chrono::seconds;

TEST(Deadline, PassesWhenItsTimeHasCome) {
  const auto later = Deadline::after(hours(1));
  EXPECT_FALSE(later.passed());
  EXPECT_GT(later.remaining(), Clock::duration::zero());
  EXPECT_LE(later.remaining(), hours(1));
  const auto deadline = Deadline::after(milliseconds(30));
  std::this_thread::sleep_until(deadline.at());
  EXPECT_TRUE(deadline.passed());
  EXPECT_EQ(deadline.remaining(), Clock::duration::zero());
  EXPECT_EQ(deadline.poll_timeout(), 0);
}

TEST(Deadline, NoTimeAndLessHavePassed) {
  for (const auto span : {milliseconds(0), milliseconds(-5), milliseconds::min()}) {
    const auto deadline = Deadline::after(span);
    EXPECT_TRUE(deadline.passed());
    EXPECT_EQ(deadline.remaining(), Clock::duration::zero());
  }
}

TEST(Deadline, TheLongestSpansNeverPass) {
  for (const auto& deadline :
       {Deadline::after(milliseconds::max()), Deadline::after(hours::max()),
        Deadline::after(Clock::duration::max()), Deadline::after(seconds::max()),
        Deadline(Clock::time_point::max())}) {
    EXPECT_FALSE(deadline.passed());
    EXPECT_GT(deadline.remaining(), hours(24 * 365));
    EXPECT_EQ(deadline.poll_timeout(), 1000);
  }
}

TEST(Deadline, PollTimeoutIsRoundedUpAndSliced) {
  EXPECT_EQ(Deadline::after(hours(1)).poll_timeout(), 1000);
  EXPECT_EQ(Deadline::after(hours(1)).poll_timeout(milliseconds(50)), 50);
  const Deadline almost(Clock::now() + std::chrono::microseconds(900));
  const int timeout = almost.poll_timeout();
  // In the last millisecond the timeout is 1, which is no busy loop, unless the machine was slow
  // and the deadline has passed.
  EXPECT_TRUE(timeout == 1 || almost.passed()) << timeout;
}

TEST(Deadline, KnowsItsWholeSpan) {
  auto deadline = Deadline::after(milliseconds(2500));
  EXPECT_NEAR(deadline.span_seconds(), 2.5, 0.1);
  std::this_thread::sleep_for(milliseconds(5));
  const Deadline copy = deadline;
  EXPECT_EQ(copy.span_seconds(), deadline.span_seconds());
  EXPECT_EQ(copy.at(), deadline.at());
}

}  // namespace
}  // namespace lockstep
