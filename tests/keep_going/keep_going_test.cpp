// Processes stay when a rank is lost, whatever they were doing then.
#include <signal.h>

#include <cstdio>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tests/launch/network.h>

namespace lockstep {
namespace {

using launch::testing::count_of;
using launch::testing::Launched;
using launch::testing::lines_of;
using ::testing::HasSubstr;
using ::testing::Not;

std::map<int, int> pids_of(const std::string& output, int generation) {
  std::map<int, int> pids;
  for (const std::string& line : lines_of(output)) {
    int pid = 0, rank = 0, world = 0, in = 0;
    const auto start = line.find("pid=");
    if (start != std::string::npos &&
        std::sscanf(line.c_str() + start, "pid=%d rank=%d world=%d generation=%d", &pid, &rank,
                    &world, &in) == 4 &&
        in == generation)
      pids[rank] = pid;
  }
  return pids;
}

// All but rank 2 of the four ranks keep their processes.
void expect_three_stay(const std::string& way) {
  Launched job = Launched::run({"--nproc-per-node", "4", "--max-restarts", "1", KEPT_RANK, way});
  EXPECT_EQ(job.wait(milliseconds(60'000)), 0) << job.error();
  const auto before = pids_of(job.output(), 0);
  const auto after = pids_of(job.output(), 1);
  ASSERT_EQ(before.size(), 4u) << job.output();
  ASSERT_EQ(after.size(), 4u) << job.output() << job.error();
  for (const int rank : {0, 1, 3}) EXPECT_EQ(after.at(rank), before.at(rank)) << job.error();
  EXPECT_NE(after.at(2), before.at(2));
  EXPECT_EQ(count_of("the sum is 4", job.output()), 4) << job.output();
  EXPECT_EQ(launch::testing::faults_in(job.error()).size(), 1u) << job.error();
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST(KeepGoing, RanksThatWaitForTheLostOne) { expect_three_stay("waiting"); }

TEST(KeepGoing, RanksThatHaveNothingToDoWithIt) { expect_three_stay("apart"); }

TEST(KeepGoing, RanksThatCompute) { expect_three_stay("computing"); }

TEST(KeepGoing, WhereOneFailsByItself) { expect_three_stay("failing"); }

TEST(KeepGoing, WhereTheProgramThrowsSomethingElse) { expect_three_stay("wrapping"); }

// The others are still on their way into the generation, or have just arrived.
TEST(KeepGoing, WhereOneIsLostWhileTheJobIsFormedAnew) {
  for (const std::string when : {"early", "late"}) {
    SCOPED_TRACE(when);
    Launched job =
        Launched::run({"--nproc-per-node", "4", "--max-restarts", "2", KEPT_RANK, "waiting", when});
    EXPECT_EQ(job.wait(milliseconds(60'000)), 0) << job.error();
    const auto before = pids_of(job.output(), 0);
    const auto after = pids_of(job.output(), 2);
    ASSERT_EQ(before.size(), 4u) << job.output();
    ASSERT_EQ(after.size(), 4u) << job.output() << job.error();
    for (const int rank : {0, 1, 3}) EXPECT_EQ(after.at(rank), before.at(rank)) << job.error();
    EXPECT_EQ(launch::testing::faults_in(job.error()).size(), 2u) << job.error();
    EXPECT_THAT(job.error(), Not(HasSubstr("did not leave")));
  }
}

// Rank 0 waits for rank 1, which is ended because it has not said that it stays.
TEST(KeepGoing, WhereAHostComesWhileRanksComeTogether) {
  using launch::testing::Network;
  const launch::testing::Folder folder;
  const Network network(2);
  if (!network.works())
    GTEST_SKIP() << "this process may not make network namespaces (needs root and 'ip')";
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  const auto start = [&](int host) {
    return network.run(host, {"--nnodes", "1:2", "--rdzv-endpoint", Network::address(0) + ":29400",
                              "--rdzv-last-call", "0", "--secret-file", secret, "--nproc-per-node",
                              "2", KEPT_RANK, "joining"});
  };
  Launched first = start(0);
  ASSERT_TRUE(first.says("joins generation 0")) << first.error();
  int before = 0;
  ASSERT_EQ(std::sscanf(first.output().c_str(), "[0] process %d", &before), 1) << first.output();
  Launched second = start(1);
  // This is much shorter than the time after which a rank that does not leave is ended.
  EXPECT_TRUE(first.says("generation=1", milliseconds(20'000))) << first.error();
  EXPECT_EQ(first.wait(milliseconds(60'000)), 0) << first.error();
  EXPECT_EQ(second.wait(milliseconds(60'000)), 0) << second.error();
  EXPECT_EQ(pids_of(first.output(), 1)[0], before) << first.output() << first.error();
  EXPECT_EQ(count_of("the sum is 4", first.output() + second.output()), 4) << first.output();
  EXPECT_THAT(first.error(), Not(HasSubstr("did not leave")));
}

TEST(KeepGoing, EndsAsBeforeWithoutARestart) {
  Launched job = Launched::run({"--nproc-per-node", "4", KEPT_RANK, "waiting"});
  EXPECT_EQ(job.wait(milliseconds(60'000)), 137) << job.error();
  EXPECT_TRUE(pids_of(job.output(), 1).empty());
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

// If no restart is left, the launcher will have no news of a stopped rank, so the error is thrown
// at once.
TEST(KeepGoing, DoesNotWaitForNewsOfAStoppedRank) {
  Launched job = Launched::run({"--nproc-per-node", "3", KEPT_RANK, "stopped"});
  EXPECT_TRUE(launch::testing::eventually(milliseconds(60'000), [&] {
    return job.error().find("gave up after ") != std::string::npos;
  })) << job.error();
  double seconds = 0;
  const std::string error = job.error();
  ASSERT_EQ(
      std::sscanf(error.c_str() + error.find("gave up after "), "gave up after %lf s: ", &seconds),
      1)
      << error;
  EXPECT_LT(seconds, 10) << error;
  EXPECT_THAT(error, HasSubstr("No answer from rank 2: stopped, or unreachable."));
}

// Ctrl-Z for longer than the deadline of the call that ranks are in: nobody is missing afterwards.
TEST(KeepGoing, TimeInWhichAllAreStoppedCountsAgainstNoDeadline) {
  Launched job = Launched::run({"--nproc-per-node", "2", KEPT_RANK, "paused"});
  ASSERT_TRUE(job.says("rank 0 has begun") && job.says("rank 1 has begun")) << job.error();
  job.kill(SIGTSTP);
  ASSERT_TRUE(job.stopped());
  std::this_thread::sleep_for(milliseconds(7000));
  job.kill(SIGCONT);
  EXPECT_EQ(job.wait(milliseconds(60'000)), 0) << job.error();
  EXPECT_EQ(count_of("the sum is 2", job.output()), 2) << job.output();
  EXPECT_EQ(job.error(), "");
}

TEST(KeepGoing, ASpareIsNobodyUntilItIsNeeded) {
  Launched job =
      Launched::run({"--nproc-per-node", "2", "--max-restarts", "1", "--spares", "1", KEPT_RANK});
  EXPECT_EQ(job.wait(milliseconds(60'000)), 0) << job.error();
  EXPECT_EQ(count_of("the sum is 2", job.output()), 2) << job.output();
  EXPECT_THAT(job.output(), Not(HasSubstr("[spare]")));
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST(KeepGoing, IsACallWithoutALauncher) {
  Launched job({KEPT_RANK});
  EXPECT_EQ(job.wait(milliseconds(60'000)), 0) << job.error();
  EXPECT_THAT(job.output(), HasSubstr("the sum is 1"));
}

}  // namespace
}  // namespace lockstep
