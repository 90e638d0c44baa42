// Rows 4 and 5: ranks that exist and make no progress.
#include <signal.h>

#include <gmock/gmock.h>

#include "disturbed.h"

namespace lockstep::faults {
namespace {

using ::testing::HasSubstr;

class Row04StoppedRank : public DisturbedTraining {};

TEST_F(Row04StoppedRank, IsNamedAndReplacedAndCannotComeBack) {
  Launched job = start({.launcher = {"--max-restarts", "1"}, .rank = {"--pace", "20"}});
  ASSERT_TRUE(reaches(6)) << job.error();
  const pid_t stopped = process_of_rank(job, 1);
  ASSERT_GT(stopped, 0);
  const auto when = std::chrono::steady_clock::now();
  ::kill(stopped, SIGSTOP);
  ASSERT_TRUE(launch::testing::eventually(milliseconds(60'000), [&] {
    return job.error().find("lockstep: fault") != std::string::npos;
  })) << job.error();
  const std::chrono::duration<double> named = std::chrono::steady_clock::now() - when;
  ::kill(stopped, SIGCONT);
  EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
  expect_nothing_left(job);
  const auto fault = only_fault(job);
  EXPECT_EQ(fault["kind"], "stopped");
  EXPECT_EQ(fault["rank"], 1);
  EXPECT_EQ(fault["restarted"], true);
  expect_within(5, named.count());
  std::printf("named after %.2f s\n", named.count());
  // Nothing of its generation happens after the next one trains.
  std::int64_t next_began = 0;
  for (const Event& event : events()) {
    if (event.generation == 1 && next_began == 0) next_began = event.at_ns;
    EXPECT_FALSE(event.generation == 0 && next_began > 0) << event.text;
  }
  expect_undisturbed_result(2);
}

class Row05StuckRank : public DisturbedTraining {};

// All of the rank's threads live, and the other ranks wait for it in the same step.
TEST_F(Row05StuckRank, IsFoundByItsProgress) {
  constexpr double kBound = 5;
  Launched job = start({.launcher = {"--max-restarts", "1", "--stuck-after", "5"},
                        .rank = {"--fault", "stuck", "--rank", "1", "--step", "7"}});
  EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
  expect_nothing_left(job);
  const auto fault = only_fault(job);
  EXPECT_EQ(fault["kind"], "stuck");
  EXPECT_EQ(fault["step"], 8) << "they count from 1";
  EXPECT_EQ(fault["restarted"], true);
  EXPECT_THAT(job.error(), HasSubstr("Rank 1 never called")) << "who is meant is in the report";
  expect_undisturbed_result(2);
  const Event stuck = first("dies");
  for (const Event& event : events()) {
    if (event.generation == 0 || event.kind != "step") continue;
    expect_within(kBound + 10, seconds_between(stuck, event));
    std::printf("the next step came %.2f s after the bound\n",
                seconds_between(stuck, event) - kBound);
    break;
  }
}

}  // namespace
}  // namespace lockstep::faults
