// A rank that dies inside a collective is named by every survivor, long before the call's deadline.
#include <signal.h>
#include <unistd.h>

#include <map>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "collective.h"

namespace lockstep::comm::faults {
namespace {

// It takes hundredths of a second on a machine with time. A busy one takes longer, and no attempt
// longer than half of the call's deadline.
constexpr double kWithin = 2.0;
constexpr milliseconds kCallDeadline(40'000);
constexpr double kNeverBeyond = 20.0;
constexpr int kAttempts = 10;
constexpr auto kStay = JobOptions::Afterwards::stay;

double seconds(Clock::duration span) { return std::chrono::duration<double>(span).count(); }

// Every survivor names exactly the victim. Returns how long the slowest took.
double expect_named(Job& job, int victim, Clock::time_point killed) {
  double slowest = 0;
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank == victim) continue;
    const Outcome outcome = job.outcome(rank);
    EXPECT_TRUE(outcome.failed) << "rank " << rank << ": " << outcome.text << outcome.said;
    EXPECT_EQ(outcome.fault, Fault::peer_lost) << outcome.text;
    EXPECT_EQ(outcome.ranks, std::vector<int>{victim}) << "rank " << rank << ": " << outcome.text;
    slowest = std::max(slowest, seconds(outcome.at - killed));
  }
  EXPECT_LT(slowest, kNeverBeyond);
  return slowest;
}

class Killed : public ::testing::TestWithParam<Media> {};

// The others are blocked in the call and wait for a rank that never makes it.
TEST_P(Killed, BeforeACallThatTheOthersAreIn) {
  for (const int n : {3, 4}) {
    for (const Collective& collective : every_collective()) {
      if (n == 4 && collective.count > 1000) continue;
      SCOPED_TRACE(fmt::format("{}, {} ranks", collective.name(), n));
      double best = kNeverBeyond;
      for (int attempt = 0; attempt < kAttempts && best > kWithin; ++attempt) {
        const int victim = (attempt + n - 1) % n;
        Job job(n, {.media = GetParam(), .afterwards = kStay}, [&](Rank& rank) {
          run(rank, collective, 0, kCallDeadline);
          rank.say("ready");
          if (rank.rank() == victim) rank.hear("never");
          for (int round = 1;; ++round) run(rank, collective, round, kCallDeadline);
        });
        for (int rank = 0; rank < n; ++rank) ASSERT_TRUE(job.says(rank, "ready"));
        std::this_thread::sleep_for(milliseconds(5));
        const auto killed = job.signal(victim, SIGKILL);
        best = std::min(best, expect_named(job, victim, killed));
        if (HasFailure()) return;
      }
      EXPECT_LE(best, kWithin);
    }
  }
}

// Calls follow each other without pause: the kill falls anywhere, also between two bytes.
void kill_anywhere(Media media, JobOptions::Afterwards afterwards) {
  std::mt19937 generator(7);
  for (const Collective& collective : every_collective()) {
    SCOPED_TRACE(collective.name());
    double best = kNeverBeyond;
    for (int attempt = 0; attempt < kAttempts && best > kWithin; ++attempt) {
      const int victim = static_cast<int>(generator() % 3);
      Job job(3, {.media = media, .afterwards = afterwards}, [&](Rank& rank) {
        for (int round = 0;; ++round) {
          run(rank, collective, round, kCallDeadline);
          if (round == 2) rank.say("ready");
        }
      });
      for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(job.says(rank, "ready"));
      std::this_thread::sleep_for(std::chrono::microseconds(generator() % 5000));
      const auto killed = job.signal(victim, SIGKILL);
      best = std::min(best, expect_named(job, victim, killed));
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_LE(best, kWithin);
  }
}

TEST_P(Killed, AnywhereInAStreamOfCalls) { kill_anywhere(GetParam(), kStay); }

// A survivor that ends at once, because it has noticed, leaves word of why: the others blame the
// victim, not it.
TEST_P(Killed, AnywhereAndTheSurvivorsEndAtOnce) {
  kill_anywhere(GetParam(), JobOptions::Afterwards::go);
}

TEST_P(Killed, TwoAtOnce) {
  Job job(4, {.media = GetParam()}, [](Rank& rank) {
    rank.say("ready");
    if (rank.rank() == 1 || rank.rank() == 2) rank.hear("never");
    run(rank, {Operation::all_reduce, Algorithm::direct, 1000}, 0, kCallDeadline);
  });
  for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(job.says(rank, "ready"));
  job.signal(1, SIGKILL);
  job.signal(2, SIGKILL);
  for (const int rank : {0, 3}) {
    const Outcome outcome = job.outcome(rank, kCallDeadline);
    ASSERT_TRUE(outcome.failed) << outcome.text;
    EXPECT_EQ(outcome.fault, Fault::peer_lost) << outcome.text;
    for (const int named : outcome.ranks) EXPECT_TRUE(named == 1 || named == 2) << outcome.text;
    EXPECT_FALSE(outcome.ranks.empty());
  }
}

// Nobody was in a call when it died: the next call finds out.
TEST_P(Killed, BetweenCalls) {
  Job job(3, {.media = GetParam()}, [](Rank& rank) {
    run(rank, {Operation::barrier, Algorithm::direct, 0}, 0, kCallDeadline);
    rank.say("ready");
    rank.hear("go");
    run(rank, {Operation::all_reduce, Algorithm::direct, 1000}, 0, kCallDeadline);
  });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(job.says(rank, "ready"));
  job.signal(0, SIGKILL);
  EXPECT_TRUE(job.outcome(0, kCallDeadline).gone);
  const auto called = Clock::now();
  for (const int rank : {1, 2}) job.tell(rank, "go");
  expect_named(job, 0, called);
}

INSTANTIATE_TEST_SUITE_P(Media, Killed, ::testing::Values(Media::shared_memory, Media::tcp),
                         [](const auto& info) { return info.param == Media::tcp ? "tcp" : "shm"; });

}  // namespace
}  // namespace lockstep::comm::faults
