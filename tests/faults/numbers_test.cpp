// Rows 12 and 13: ranks with non-finite numbers, and a rank that is slow.
#include <gmock/gmock.h>

#include <set>

#include "disturbed.h"

namespace lockstep::faults {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// One rank has bad numbers in one step; the other's numbers are good.
class Row12NonFinite : public DisturbedTraining {
 protected:
  static Words flags(const std::string& kind, const std::string& reaction) {
    return {"--fault", kind, "--rank", "1", "--step", "7", "--non-finite", reaction};
  }

  void expect_all_stop(const std::string& kind);
  void expect_all_skip(const std::string& kind);
};

void Row12NonFinite::expect_all_stop(const std::string& kind) {
  SCOPED_TRACE(kind);
  const std::string name = "stop-" + kind;
  Launched job = start({.rank = flags(kind, "stop")}, name);
  EXPECT_NE(job.wait(milliseconds(180'000)), 0);
  expect_nothing_left(job);
  EXPECT_THAT(job.error(), HasSubstr("step 8")) << "they count from 1";
  std::set<int> stopped;
  for (const Event& event : events(name)) {
    EXPECT_LE(event.step, 7) << event.text;
    EXPECT_NE(event.kind, "failed") << "no rank may be left waiting for another: " << event.text;
    if (event.kind == "stopped") stopped.insert(event.rank);
  }
  EXPECT_EQ(stopped, (std::set<int>{0, 1}));
}

void Row12NonFinite::expect_all_skip(const std::string& kind) {
  SCOPED_TRACE(kind);
  const std::string name = "skip-" + kind;
  Launched job = start({.rank = flags(kind, "skip")}, name);
  EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
  expect_nothing_left(job);
  EXPECT_THAT(job.output(), HasSubstr("step 8 was skipped on all ranks"));
  EXPECT_THAT(launch::testing::faults_in(job.error()), ::testing::IsEmpty());
  std::set<std::string> ends;
  for (const Event& event : events(name))
    if (event.kind == "ended") ends.insert(event.text.substr(event.text.find(" step ")));
  ASSERT_EQ(ends.size(), 1u) << "ranks have other weights, or skipped other steps";
  EXPECT_THAT(*ends.begin(), HasSubstr("step 20 skipped 1 "));
  expect_each_sample_once(name);
}

TEST_F(Row12NonFinite, StopsAllRanksInTheSameStep) { expect_all_stop("nan_loss"); }
TEST_F(Row12NonFinite, IsSkippedOnAllRanks) { expect_all_skip("inf_gradient"); }

class WholeRow12NonFinite : public Row12NonFinite {};

TEST_F(WholeRow12NonFinite, LossOrGradientNanOrInfinite) {
  for (const char* kind : {"nan_loss", "inf_loss", "nan_gradient", "inf_gradient"}) {
    expect_all_stop(kind);
    expect_all_skip(kind);
  }
}

class Row13SlowRank : public DisturbedTraining {};

TEST_F(Row13SlowRank, IsNamedWithinTwentySteps) {
  Launched job = start({.num_ranks = 3,
                        .rank = {"--pace", "30", "--epochs", "3", "--fault", "slow", "--rank", "1",
                                 "--step", "10"}});
  EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
  expect_nothing_left(job);
  // The rank was slow in the last twenty steps of the run.
  EXPECT_THAT(job.error(), HasSubstr("rank 1 is slow"));
  EXPECT_THAT(job.error(), Not(HasSubstr("rank 0 is slow")));
  EXPECT_THAT(job.error(), Not(HasSubstr("rank 2 is slow")));
  EXPECT_THAT(launch::testing::faults_in(job.error()), ::testing::IsEmpty())
      << "a slow rank is no failure";
  expect_undisturbed_result(3, {"--epochs", "3"});
}

}  // namespace
}  // namespace lockstep::faults
