// Jobs that fail in a call of NCCL. Two ranks share a GPU, which takes turns between them. No time
// is asserted except that the job ends by the call's deadline, not the job's.
#include <algorithm>
#include <cstdio>
#include <map>

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/join.h>

#include "../../launch/launched.h"

namespace lockstep::comm::conformance {
namespace {

using launch::testing::Launched;
using launch::testing::this_program;
using ::testing::AllOf;
using ::testing::HasSubstr;

class NcclFaults_cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto built = available_backends();
    if (!at::hasCUDA() || std::ranges::find(built, "nccl") == built.end())
      GTEST_SKIP() << "needs a GPU and a build with NCCL";
  }

  // Ranks end by themselves or by their launcher, well before the job's own minute is over.
  static Launched end_of(const std::string& fault) {
    Launched job = Launched::run(
        {"--standalone", "--nproc-per-node", "2", this_program(), "--scenario", "nccl-" + fault});
    EXPECT_NE(job.wait(milliseconds(45'000)), 0) << job.output() << job.error();
    EXPECT_THAT(job.output(), HasSubstr("[0] over nccl+shm"));
    EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
    return job;
  }
};

TEST_F(NcclFaults_cuda, ADifferentOperationIsNamedOnBothRanks) {
  const Launched job = end_of("operation");
  for (const std::string rank : {"[0] ended by ", "[1] ended by "})
    EXPECT_THAT(job.output(), HasSubstr(rank));
  EXPECT_THAT(job.output(),
              AllOf(HasSubstr("mismatch"), HasSubstr("broadcast #"), HasSubstr("all_reduce #")));
}

TEST_F(NcclFaults_cuda, ADifferentSizeIsNamed) {
  EXPECT_THAT(end_of("size").output(),
              AllOf(HasSubstr("mismatch"), HasSubstr("1000"), HasSubstr("2000")));
}

TEST_F(NcclFaults_cuda, ADifferentTypeIsNamed) {
  EXPECT_THAT(end_of("dtype").output(),
              AllOf(HasSubstr("mismatch"), HasSubstr("float32"), HasSubstr("float64")));
}

TEST_F(NcclFaults_cuda, ATensorOnTheHostIsAnotherCall) {
  EXPECT_THAT(end_of("place").output(), AllOf(HasSubstr("mismatch"), HasSubstr(", nccl)")));
}

TEST_F(NcclFaults_cuda, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  EXPECT_THAT(end_of("behind").output(), HasSubstr("Not yet in this call: rank 1"));
}

// NCCL connects two ranks in their first exchange, and waits there.
TEST_F(NcclFaults_cuda, ARankThatDoesNotComeToTheFirstExchangeIsNamedAtTheDeadline) {
  EXPECT_THAT(end_of("exchange").output(), AllOf(HasSubstr("[0] ended by "), HasSubstr("rank 1")));
}

TEST_F(NcclFaults_cuda, PartsThatDoNotFitAreNamed) {
  EXPECT_THAT(end_of("parts").output(), AllOf(HasSubstr("mismatch"), HasSubstr("all_to_all")));
}

TEST_F(NcclFaults_cuda, AStoppedRankIsNamedAtTheDeadline) {
  EXPECT_THAT(end_of("stop").output(), AllOf(HasSubstr("[0] ended by "), HasSubstr("rank 1")));
}

// The group, NCCL or the launcher may name it first.
TEST_F(NcclFaults_cuda, AKilledRankIsNamed) {
  const Launched job = end_of("die");
  EXPECT_THAT(job.error(), HasSubstr("the job failed: rank 1 (local rank 1"));
}

// The process that stays aborts its communicators and makes new ones.
TEST_F(NcclFaults_cuda, AnElasticJobGoesOn) {
  Launched job = Launched::run({"--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
                                this_program(), "--scenario", "nccl-go-on"});
  EXPECT_EQ(job.wait(milliseconds(60'000)), 0) << job.output() << job.error();
  std::map<int, int> process_of_rank_0;  // keyed by generation
  for (const std::string& line : launch::testing::lines_of(job.output())) {
    int process = 0, generation = 0;
    double sum = 0;
    if (std::sscanf(line.c_str(), "[0] process %d generation %d sum %lf", &process, &generation,
                    &sum) != 3)
      continue;
    process_of_rank_0[generation] = process;
    EXPECT_EQ(sum, 2) << line;
  }
  ASSERT_EQ(process_of_rank_0.size(), 2u) << job.output();
  EXPECT_EQ(process_of_rank_0[0], process_of_rank_0[1]);
}

TEST_F(NcclFaults_cuda, AnAbortThrowsWhoWaits) {
  const Launched job = end_of("abort");
  for (const std::string& line : launch::testing::lines_of(job.output()))
    if (line.starts_with("[1] ended by ")) {
      EXPECT_THAT(line, HasSubstr("the loss is not a number"));
      return;
    }
  FAIL() << "rank 1 has not heard of it: " << job.output();
}

}  // namespace
}  // namespace lockstep::comm::conformance
