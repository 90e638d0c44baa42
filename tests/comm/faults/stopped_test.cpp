// Ranks that stop, leave, or abort the group.
#include <signal.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "collective.h"

namespace lockstep::comm::faults {
namespace {

constexpr milliseconds kTimeout(2000);
constexpr auto kStay = JobOptions::Afterwards::stay;

class Absent : public ::testing::TestWithParam<Media> {};

TEST_P(Absent, AStoppedRankIsNamedAtTheDeadlineAndCannotComeBack) {
  for (const Collective collective : {Collective{Operation::all_reduce, Algorithm::direct, 1000},
                                      Collective{Operation::all_reduce, Algorithm::direct, 600'000},
                                      Collective{Operation::all_reduce, Algorithm::tree, 1000},
                                      Collective{Operation::all_gather, Algorithm::ring, 600'000},
                                      Collective{Operation::barrier, Algorithm::direct, 0}}) {
    SCOPED_TRACE(collective.name());
    constexpr int kVictim = 1;
    Job job(4, {.media = GetParam(), .afterwards = kStay}, [&](Rank& rank) {
      run(rank, collective, 0, milliseconds(20'000));  // no rank is missing yet, however slow
      rank.say("ready");
      rank.hear("go");
      run(rank, collective, 1, kTimeout);
      run(rank, collective, 2, kTimeout);
    });
    for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(job.says(rank, "ready"));
    job.stop(kVictim);
    const auto begin = Clock::now();
    for (int rank = 0; rank < 4; ++rank) job.tell(rank, "go");
    for (const int rank : {0, 2, 3}) {
      const Outcome outcome = job.outcome(rank, milliseconds(20'000));
      ASSERT_TRUE(outcome.failed) << outcome.text;
      EXPECT_EQ(outcome.fault, Fault::timeout) << outcome.text;
      EXPECT_EQ(outcome.ranks, std::vector<int>{kVictim}) << "rank " << rank << ":" << outcome.text;
      EXPECT_GE(outcome.at - begin, kTimeout - milliseconds(100));
    }
    // The victim wakes up in a group that has ended without it.
    job.signal(kVictim, SIGCONT);
    const Outcome stale = job.outcome(kVictim, milliseconds(10'000));
    EXPECT_TRUE(stale.failed) << stale.text << stale.said;
  }
}

// A rank that is stopped for less than the deadline costs time and nothing else.
TEST_P(Absent, AShortStopIsForgiven) {
  constexpr int kStopped = 1, kRounds = 40, kStoppedIn = 20;
  Job job(3, {.media = GetParam()}, [](Rank& rank) {
    std::uint32_t all = 0;
    for (int round = 0; round < kRounds; ++round) {
      if (rank.rank() == kStopped && round == kStoppedIn) {
        rank.say("ready");
        rank.hear("go");
      }
      all ^= run(rank, {Operation::all_reduce, Algorithm::direct, 100'000}, round,
                 milliseconds(20'000));
      if (round == kStoppedIn) rank.say("through");
    }
    rank.say(fmt::format("result {}", all));
  });
  ASSERT_TRUE(job.says(kStopped, "ready"));
  job.stop(kStopped);
  job.tell(kStopped, "go");
  // The others are in a call that does not end without it.
  for (const int rank : {0, 2})
    EXPECT_FALSE(job.says(rank, "through", milliseconds(350))) << "rank " << rank;
  job.signal(kStopped, SIGCONT);
  std::string first;
  for (int rank = 0; rank < 3; ++rank) {
    const Outcome outcome = job.outcome(rank);
    ASSERT_TRUE(outcome.finished) << "rank " << rank << ": " << outcome.text;
    const std::string result = outcome.said.substr(outcome.said.find("result"));
    if (rank == 0) first = result;
    EXPECT_EQ(result, first);
  }
}

TEST_P(Absent, ARankThatLeftInGoodOrderIsNamed) {
  for (const int leaver : {0, 2}) {
    Job job(3, {.media = GetParam()}, [leaver](Rank& rank) {
      run(rank, {Operation::barrier, Algorithm::direct, 0}, 0, milliseconds(20'000));
      if (rank.rank() == leaver) return;
      run(rank, {Operation::all_reduce, Algorithm::direct, 1000}, 0, milliseconds(20'000));
    });
    EXPECT_TRUE(job.outcome(leaver).finished);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == leaver) continue;
      const Outcome outcome = job.outcome(rank, milliseconds(10'000));
      ASSERT_TRUE(outcome.failed) << outcome.text;
      EXPECT_EQ(outcome.fault, Fault::peer_lost) << outcome.text;
      EXPECT_EQ(outcome.ranks, std::vector<int>{leaver}) << outcome.text;
      EXPECT_NE(outcome.text.find("good order"), std::string::npos) << outcome.text;
    }
  }
}

// What each of four ranks gets of a call, after which it leaves at once, or stays until all have
// it.
std::vector<std::string> results_of(const Collective& collective, Media media, bool leaves) {
  Job job(4, {.media = media}, [&](Rank& rank) {
    if (leaves && rank.rank() == 3) std::this_thread::sleep_for(milliseconds(5));
    rank.say(fmt::format("result {}", run(rank, collective, 0, milliseconds(20'000))));
    if (!leaves) run(rank, {Operation::barrier, Algorithm::direct, 0}, 0, milliseconds(20'000));
  });
  std::vector<std::string> results;
  for (int rank = 0; rank < 4; ++rank) {
    const Outcome outcome = job.outcome(rank);
    EXPECT_TRUE(outcome.finished) << "rank " << rank << ": " << outcome.text << outcome.said;
    const auto begin = std::min(outcome.said.find("result"), outcome.said.size());
    results.push_back(outcome.said.substr(begin, outcome.said.find('\n', begin) - begin));
  }
  return results;
}

// Ranks that have done their part may leave at once, even while others are still reading.
TEST_P(Absent, LeavingAfterTheLastCallHarmsNobody) {
  for (const Collective& collective : every_collective()) {
    SCOPED_TRACE(collective.name());
    const auto results = results_of(collective, GetParam(), /*leaves=*/true);
    EXPECT_THAT(results, ::testing::Each(::testing::StartsWith("result ")));
    EXPECT_EQ(results, results_of(collective, GetParam(), /*leaves=*/false));
    if (HasFailure()) return;
  }
}

TEST_P(Absent, AnInterruptEndsTheWaitOnEveryRank) {
  Job job(4, {.media = GetParam()}, [](Rank& rank) {
    std::thread other;
    if (rank.rank() == 2)
      other = std::thread([&rank] {
        std::this_thread::sleep_for(milliseconds(30));
        rank.transport().interrupt({.fault = Fault::aborted,
                                    .found_by = 2,
                                    .operation = "abort",
                                    .ranks = {2},
                                    .explanation = "called off"});
      });
    rank.say("ready");
    if (rank.rank() == 0) rank.hear("never");
    try {
      run(rank, {Operation::all_reduce, Algorithm::direct, 1000}, 0, milliseconds(20'000));
    } catch (...) {
      if (other.joinable()) other.join();
      throw;
    }
  });
  ASSERT_TRUE(job.says(0, "ready"));
  for (const int rank : {1, 2, 3}) {
    // The wait is shorter than the call's deadline.
    const Outcome outcome = job.outcome(rank, milliseconds(15'000));
    ASSERT_TRUE(outcome.failed) << outcome.text;
    EXPECT_EQ(outcome.fault, Fault::aborted) << outcome.text;
    EXPECT_EQ(outcome.ranks, std::vector<int>{2}) << outcome.text;
    EXPECT_NE(outcome.text.find("called off"), std::string::npos) << outcome.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Media, Absent, ::testing::Values(Media::shared_memory, Media::tcp),
                         [](const auto& info) { return info.param == Media::tcp ? "tcp" : "shm"; });

}  // namespace
}  // namespace lockstep::comm::faults
