// Row 14: wall clocks are wrong on some hosts, or from some moment on.
#include <gmock/gmock.h>

#include "disturbed.h"

namespace lockstep::faults {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Row14WrongClock : public DisturbedHosts {
 protected:
  // The hosts' clocks are `ahead` seconds ahead, from `after` seconds after their start on.
  void expect_nothing_happens(const Words& ahead, const std::string& after) {
    std::vector<Launched> hosts;
    for (std::size_t host = 0; host < ahead.size(); ++host)
      hosts.push_back(start_on(
          static_cast<int>(host),
          {.num_ranks = 1,
           .launcher = {"--nnodes", std::to_string(ahead.size()), "--max-restarts", "1",
                        "--stuck-after", "30"},
           .rank = {"--pace", "150"},
           .variables = with_shim({"SHIM_CLOCK=" + ahead[host], "SHIM_CLOCK_AFTER=" + after})}));
    for (Launched& host : hosts) {
      EXPECT_EQ(host.wait(milliseconds(180'000)), 0) << host.error();
      expect_nothing_left(host);
      EXPECT_THAT(launch::testing::faults_in(host.error()), IsEmpty());
    }
    expect_undisturbed_result(static_cast<int>(ahead.size()));
  }
};

// Checks the disturbance itself: programs do see another clock.
TEST_F(Row14WrongClock, IsWrong) {
  const auto seconds_of = [](Words variables) {
    Launched date({"date", "+%s"}, std::move(variables));
    EXPECT_EQ(date.wait(), 0);
    return std::stoll(date.output());
  };
  const long long right = seconds_of({});
  EXPECT_NEAR(static_cast<double>(seconds_of(with_shim({"SHIM_CLOCK=3600"})) - right), 3600, 60);
  EXPECT_NEAR(static_cast<double>(seconds_of(with_shim({"SHIM_CLOCK=-3600"})) - right), -3600, 60);
}

TEST_F(Row14WrongClock, OnTwoOfThreeHosts) {
  HOSTS_OR_SKIP(3);
  expect_nothing_happens({"0", "3600", "-3600"}, "0");
}

TEST_F(Row14WrongClock, JumpsWhileTheJobRuns) {
  HOSTS_OR_SKIP(2);
  expect_nothing_happens({"3600", "-3600"}, "2");
}

}  // namespace
}  // namespace lockstep::faults
