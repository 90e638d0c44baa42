#include <lockstep/flight/report.h>

#include <algorithm>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep::flight {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr std::int64_t kSecond = 1'000'000'000;

// Makes a rank's dump; times are in seconds before the dump. Each rank's clock has its own origin.
class Rank {
 public:
  Rank(int rank, int num_ranks, std::string group = "world") {
    dump_.group = std::move(group);
    dump_.rank = rank;
    dump_.members.resize(static_cast<std::size_t>(num_ranks));
    std::iota(dump_.members.begin(), dump_.members.end(), 0);
    dump_.now_ns = (1000 + 5000 * rank) * kSecond;
    dump_.cause.reason = "test";
  }
  // A rank of a group whose members are these ranks of the job.
  Rank(int rank, std::vector<int> members, std::string group) : Rank(0, 1, std::move(group)) {
    const auto at = std::find(members.begin(), members.end(), rank);
    dump_.rank = static_cast<int>(at - members.begin());
    dump_.members = std::move(members);
    dump_.now_ns = (1000 + 5000 * rank) * kSecond;
  }

  Rank& call(std::uint64_t sequence, std::string summary, std::string site, State state,
             double seconds_ago) {
    Entry entry;
    entry.number = dump_.entries.size() + 1;
    entry.sequence = sequence;
    entry.operation = summary.substr(0, summary.find(' '));
    entry.summary = std::move(summary);
    entry.call_site = std::move(site);
    entry.state = state;
    const auto at = dump_.now_ns - static_cast<std::int64_t>(seconds_ago * kSecond);
    entry.queued_ns = at;
    if (state != State::queued) entry.started_ns = at;
    if (state == State::finished) entry.finished_ns = at;
    if (state == State::failed) entry.finished_ns = dump_.now_ns;
    dump_.last_sequence = std::max(dump_.last_sequence, sequence);
    dump_.entries.push_back(std::move(entry));
    return *this;
  }

  Rank& exchange_with(std::vector<int> peers, State state, double seconds_ago) {
    call(0, "exchange (8 float32)", "pipe.cpp:9", state, seconds_ago);
    dump_.entries.back().peers = std::move(peers);
    return *this;
  }
  Rank& gave_up(Fault fault, std::vector<int> at_fault) {
    dump_.cause = {.reason = "it failed", .fault = fault_name(fault), .at_fault = at_fault};
    return *this;
  }

  Rank& finished_barrier(double seconds_ago) {
    return call(6, "barrier #6", "train.cpp:40", State::finished, seconds_ago);
  }
  Rank& in_all_reduce(State state = State::started, double seconds_ago = 5) {
    return call(7, "all_reduce #7 (sum of 1024 float32)", "train.cpp:42", state, seconds_ago);
  }

  operator Dump() const { return dump_; }
  Dump dump_;
};

TEST(Report, NothingFromNoDumps) { EXPECT_EQ(merged_report(std::vector<Dump>{}), ""); }

TEST(Report, AllInTheSameCall) {
  std::vector<Dump> dumps;
  for (int rank = 0; rank < 4; ++rank)
    dumps.push_back(Rank(rank, 4).finished_barrier(9).in_all_reduce());
  EXPECT_EQ(
      merged_report(dumps),
      "All 4 ranks of group 'world' are in all_reduce #7 (train.cpp:42), for 5.0 s: nobody is "
      "missing, but it does not end.\n"
      "\n"
      "group 'world' (4 ranks):\n"
      "  ranks 0-3 are in all_reduce #7 (sum of 1024 float32) called at train.cpp:42, for "
      "5.0 s\n");
}

TEST(Report, OneIsBehind) {
  const std::string report = merged_report(
      {Rank(0, 4).finished_barrier(9).in_all_reduce(), Rank(1, 4).in_all_reduce(),
       Rank(2, 4).finished_barrier(7.2), Rank(3, 4).in_all_reduce(State::started, 4.8)});
  EXPECT_THAT(report, StartsWith("Rank 2 never called all_reduce #7 of group 'world' "
                                 "(train.cpp:42); ranks 0, 1 and 3 wait for it, for 5.0 s now.\n"
                                 "  Rank 2's last call, barrier #6 of group 'world' "
                                 "(train.cpp:40), ended 7.2 s ago.\n"));
  EXPECT_THAT(report, HasSubstr("ranks 0, 1 and 3 are in all_reduce #7 (sum of 1024 float32) "
                                "called at train.cpp:42, for 4.8 s to 5.0 s\n"));
  EXPECT_THAT(report, HasSubstr("rank 2 is behind: its last call, barrier #6 called at "
                                "train.cpp:40, finished 7.2 s ago; it never called #7\n"));
  EXPECT_THAT(report, Not(HasSubstr("no word")));
  EXPECT_THAT(report, Not(HasSubstr("different calls")));
}

TEST(Report, FailedCallsSayHowLongTheyTook) {
  const std::string report =
      merged_report({Rank(0, 2).in_all_reduce(State::failed, 5), Rank(1, 2).finished_barrier(6)});
  EXPECT_THAT(report, HasSubstr("rank 0 failed in all_reduce #7 (sum of 1024 float32) called at "
                                "train.cpp:42 after 5.0 s\n"));
  EXPECT_THAT(report, HasSubstr("rank 1 is behind"));
}

// Calls queued behind a stuck call do not make the other ranks look behind.
TEST(Report, TheFirstUnfinishedCallCounts) {
  Rank eager = Rank(0, 2).in_all_reduce();
  eager.call(8, "barrier #8", "train.cpp:50", State::queued, 1);
  const std::string report = merged_report({eager, Rank(1, 2).in_all_reduce()});
  EXPECT_THAT(report, HasSubstr("ranks 0 and 1 are in all_reduce #7"));
  EXPECT_THAT(report, Not(HasSubstr("behind")));
}

TEST(Report, StuckInAnEarlierCall) {
  const std::string report = merged_report(
      {Rank(0, 2).call(6, "broadcast #6", "a.cpp:1", State::finished, 8).in_all_reduce(),
       Rank(1, 2).call(6, "broadcast #6", "a.cpp:1", State::started, 8)});
  EXPECT_THAT(report, HasSubstr("rank 0 is in all_reduce #7"));
  EXPECT_THAT(report, HasSubstr("rank 1 is behind: it is in broadcast #6 called at a.cpp:1, for "
                                "8.0 s; it never called #7\n"));
}

TEST(Report, FarBehindAndNotBegun) {
  const std::string report =
      merged_report({Rank(0, 3).in_all_reduce(),
                     Rank(1, 3).call(3, "barrier #3", "a.cpp:1", State::finished, 1), Rank(2, 3)});
  EXPECT_THAT(report, HasSubstr("it never called #4 to #7\n"));
  EXPECT_THAT(report, HasSubstr("rank 2 is behind: no call made in this group; others are at #7"));
}

TEST(Report, Mismatch) {
  const std::string report = merged_report(
      {Rank(0, 3).in_all_reduce(),
       Rank(1, 3).call(7, "broadcast #7 (8 int64 from rank 0)", "eval.cpp:9", State::started, 5),
       Rank(2, 3).in_all_reduce()});
  EXPECT_THAT(report,
              StartsWith("Ranks made different calls as #7 of group 'world': rank 1 called "
                         "broadcast #7 (8 int64 from rank 0) at eval.cpp:9, ranks 0 and 2 called "
                         "all_reduce #7 (sum of 1024 float32) at train.cpp:42.\n"));
}

TEST(Report, OnlyTheFirstMismatchIsSaid) {
  Rank skipped = Rank(0, 2).call(6, "all_gather #6", "a.cpp:1", State::finished, 1);
  skipped.call(7, "barrier #7", "a.cpp:2", State::started, 1);
  const std::string report =
      merged_report({skipped, Rank(1, 2).finished_barrier(1).in_all_reduce()});
  EXPECT_THAT(report, HasSubstr("different calls as #6"));
  EXPECT_THAT(report, Not(HasSubstr("different calls as #7")));
}

TEST(Report, OneIsMissing) {
  const std::string report = merged_report(
      {Rank(0, 4).in_all_reduce(), Rank(1, 4).in_all_reduce(), Rank(3, 4).in_all_reduce()});
  EXPECT_THAT(report, HasSubstr("ranks 0, 1 and 3 are in all_reduce #7"));
  EXPECT_THAT(report, HasSubstr("no word from rank 2"));
}

TEST(Report, AllFinished) {
  const std::string report =
      merged_report({Rank(0, 2).finished_barrier(2), Rank(1, 2).finished_barrier(3)});
  EXPECT_THAT(report, StartsWith("Nothing hangs: no rank is in a call.\n"));
  EXPECT_THAT(report, HasSubstr("ranks 0 and 1 have finished barrier #6 called at train.cpp:40, "
                                "2.0 s to 3.0 s ago\n"));
  EXPECT_THAT(report, HasSubstr("nothing is in flight"));
  EXPECT_THAT(report, Not(HasSubstr("behind")));
}

TEST(Report, PointToPointIsNotCompared) {
  const std::string report =
      merged_report({Rank(0, 2).finished_barrier(9).call(0, "exchange (2 transfers)", "p.cpp:3",
                                                         State::started, 4),
                     Rank(1, 2).finished_barrier(9).call(0, "exchange (1 transfer)", "p.cpp:8",
                                                         State::finished, 4)});
  EXPECT_THAT(report,
              HasSubstr("rank 0 is in exchange (2 transfers) called at p.cpp:3, for 4.0 s"));
  EXPECT_THAT(report, Not(HasSubstr("different calls")));
  EXPECT_THAT(report, Not(HasSubstr("behind")));
  EXPECT_THAT(report, Not(HasSubstr("nothing is in flight")));
}

TEST(Report, PushedOutOfTheRing) {
  Rank busy(1, 2);
  busy.call(0, "exchange", "p.cpp:3", State::finished, 1);
  busy.dump_.last_sequence = 6;
  const std::string report = merged_report({Rank(0, 2).in_all_reduce(), busy});
  EXPECT_THAT(report, HasSubstr("rank 1 is behind: its last call is #6; it never called #7"));
}

TEST(Report, GroupsInTroubleComeFirst) {
  Dump sub = Rank(3, {2, 3}, "tp").in_all_reduce();
  sub.generation = 4;
  Dump world = Rank(3, std::vector<int>{3}, "world").finished_barrier(1);
  world.generation = 4;
  const std::string report = merged_report({world, sub});
  EXPECT_THAT(report, StartsWith("Rank 2 left no dump: it is stopped or dead, or on a host whose "
                                 "dumps are not here; rank 3 waits for it in all_reduce #7 of "
                                 "group 'tp' (train.cpp:42), for 5.0 s now.\n\n"
                                 "group 'tp' (of the job's ranks 2 and 3; generation 4):\n"));
  EXPECT_THAT(report, HasSubstr("rank 3 is in all_reduce #7"));
  EXPECT_THAT(report, HasSubstr("no word from rank 2"));
  EXPECT_THAT(report, HasSubstr("nothing is in flight in 'world' of rank 3\n"));
}

TEST(Report, GenerationsBeforeTheNewestAreOver) {
  Dump before = Rank(0, 2).in_all_reduce(State::failed);
  Dump now = Rank(0, 2).finished_barrier(1);
  now.generation = 1;
  Dump other = Rank(1, 2).finished_barrier(1);
  other.generation = 1;
  const std::string report = merged_report({before, now, other});
  EXPECT_THAT(report, StartsWith("Nothing hangs"));
  EXPECT_THAT(report, Not(HasSubstr("all_reduce")));
}

TEST(Report, LongListsAreCounted) {
  std::vector<Dump> dumps;
  for (int rank = 0; rank < 64; ++rank)
    dumps.push_back(rank % 2 == 1 ? Rank(rank, 64).finished_barrier(40)
                                  : Rank(rank, 64).in_all_reduce(State::started, 31));
  EXPECT_THAT(merged_report(dumps), StartsWith("32 ranks never called all_reduce #7 of group "
                                               "'world' (train.cpp:42); 32 ranks wait for them, "
                                               "for 31.0 s now.\n"));
}

TEST(Report, RangesAreShort) {
  std::vector<Dump> dumps;
  for (int rank = 0; rank < 64; ++rank)
    if (rank != 5) dumps.push_back(Rank(rank, 64).in_all_reduce(State::failed, 3700));
  const std::string report = merged_report(dumps);
  EXPECT_THAT(report, HasSubstr("Rank 5 left no dump"));
  EXPECT_THAT(report, HasSubstr("ranks 0-4 and 6-63 waited for it in all_reduce #7 of group "
                                "'world' (train.cpp:42), for 1 h 1 min, and gave up.\n"));
}

// Rank 0 waits in 'pp' for rank 2, which waits in 'tp' for rank 3, which computes.
TEST(Report, ChainsAreFollowedAcrossGroups) {
  const std::vector<Dump> dumps = {Rank(0, {0, 2}, "pp").exchange_with({1}, State::started, 20),
                                   Rank(0, {0, 1}, "tp").finished_barrier(21),
                                   Rank(1, {1, 3}, "pp").exchange_with({1}, State::started, 21),
                                   Rank(1, {0, 1}, "tp").finished_barrier(22),
                                   Rank(2, {0, 2}, "pp").exchange_with({0}, State::finished, 60),
                                   Rank(2, {2, 3}, "tp").in_all_reduce(State::started, 31),
                                   Rank(3, {1, 3}, "pp").exchange_with({0}, State::finished, 61),
                                   Rank(3, {2, 3}, "tp").finished_barrier(33)};
  const std::string report = merged_report(dumps);
  EXPECT_THAT(
      report,
      StartsWith("Rank 3 never called all_reduce #7 of group 'tp' (train.cpp:42); ranks 0-2 "
                 "wait for it, directly or through others, for 31.0 s now.\n"
                 "  Rank 3's last call, barrier #6 of group 'tp' (train.cpp:40), ended 33.0 "
                 "s ago.\n"
                 "  Rank 0 waits in exchange with rank 2 of group 'pp' (pipe.cpp:9) for "
                 "rank 2, which waits in all_reduce #7 of group 'tp' (train.cpp:42) for "
                 "rank 3.\n"));
  // The report names only one cause.
  EXPECT_EQ(report.find("never called"), report.rfind("Rank 3 never called") + 7);
}

TEST(Report, WhoIsMissingFromATransfer) {
  const std::string report =
      merged_report({Rank(4, {4, 6}, "pp").exchange_with({1}, State::started, 20),
                     Rank(6, {4, 6}, "pp").exchange_with({0}, State::finished, 40)});
  EXPECT_THAT(report, StartsWith("Rank 6 has not come to the exchange with rank 6 of group 'pp' "
                                 "(pipe.cpp:9) that rank 4 is in; rank 4 waits for it, for 20.0 s "
                                 "now.\n"));
  EXPECT_THAT(report, HasSubstr("rank 4 is in exchange (8 float32) with rank 6 called at "
                                "pipe.cpp:9, for 20.0 s\n"));
}

TEST(Report, CirclesAreShown) {
  const std::string report =
      merged_report({Rank(0, {0, 1}, "a").in_all_reduce(), Rank(0, {0, 1}, "b").finished_barrier(6),
                     Rank(1, {0, 1}, "a").finished_barrier(6),
                     Rank(1, {0, 1}, "b").call(7, "barrier #7", "b.cpp:1", State::started, 4)});
  EXPECT_THAT(report,
              StartsWith("Ranks wait for each other in a circle: rank 0 waits in all_reduce "
                         "#7 of group 'a' (train.cpp:42) for rank 1, which waits in "
                         "barrier #7 of group 'b' (b.cpp:1) for rank 0.\n"));
}

TEST(Report, TheDeadAreCalledDead) {
  const std::string report =
      merged_report({Rank(0, 3).in_all_reduce(State::failed, 0.2).gave_up(Fault::peer_lost, {2}),
                     Rank(1, 3).in_all_reduce(State::failed, 0.1).gave_up(Fault::peer_lost, {2})});
  EXPECT_THAT(report, StartsWith("Rank 2 is gone; ranks 0 and 1 waited for it in all_reduce #7 of "
                                 "group 'world' (train.cpp:42), for 0.2 s, and gave up.\n"));
  EXPECT_THAT(report, HasSubstr("ranks 0 and 1 gave up because: it failed\n"));
}

// A rank that computed for too long makes the call when the others have given up.
TEST(Report, WhoCameLateIsNamed) {
  const std::string report = merged_report({Rank(0, 3).in_all_reduce(State::failed, 5),
                                            Rank(1, 3).in_all_reduce(State::failed, 0.1),
                                            Rank(2, 3).in_all_reduce(State::failed, 4.7)});
  EXPECT_THAT(report, StartsWith("Rank 1 came to all_reduce #7 of group 'world' (train.cpp:42) "
                                 "when ranks 0 and 2 had given up, at least 4.9 s after the "
                                 "first.\n"));
}

TEST(Report, AJobAtWorkIsNotCalledHung) {
  const std::vector<Dump> dumps = {Rank(0, 2).in_all_reduce(State::started, 0.2),
                                   Rank(1, 2).finished_barrier(0.3)};
  EXPECT_THAT(merged_report(dumps), StartsWith("No call has failed or takes longer than 0.2 s: "
                                               "this may be a job at work.\n"));
  EXPECT_FALSE(hangs(dumps));
  EXPECT_TRUE(hangs({Rank(0, 2).in_all_reduce(), Rank(1, 2).finished_barrier(9)}));
  EXPECT_TRUE(hangs({Rank(0, 1).in_all_reduce(State::failed, 0.1)}));
}

TEST(Report, ProgressIsSaid) {
  Rank stuck = Rank(1, 2).finished_barrier(9);
  stuck.dump_.progress =
      Progress{.step = 812, .phase = "forward", .noted_ns = stuck.dump_.now_ns - 8 * kSecond};
  EXPECT_THAT(merged_report({Rank(0, 2).in_all_reduce(), stuck}),
              HasSubstr("ended 9.0 s ago; its program said 8.0 s ago that it is in step 812 "
                        "(forward).\n"));
}

TEST(Report, TheSameForPrograms) {
  const std::vector<Dump> dumps = {Rank(4, {4, 5}, "tp").in_all_reduce(),
                                   Rank(5, {4, 5}, "tp").finished_barrier(9)};
  const auto report = nlohmann::json::parse(merged_report_json(dumps));
  EXPECT_TRUE(report.at("hangs"));
  ASSERT_EQ(report.at("findings").size(), 1u);
  const auto& finding = report.at("findings")[0];
  EXPECT_EQ(finding.at("kind"), "never_called");
  EXPECT_EQ(finding.at("ranks"), std::vector<int>{5});
  EXPECT_EQ(finding.at("waiting"), std::vector<int>{4});
  EXPECT_EQ(finding.at("group"), "tp");
  EXPECT_EQ(finding.at("sequence"), 7);
  EXPECT_EQ(finding.at("call_site"), "train.cpp:42");
  EXPECT_NEAR(finding.at("seconds").get<double>(), 5, 1e-6);
  ASSERT_EQ(report.at("groups").size(), 1u);
  EXPECT_EQ(report.at("groups")[0].at("ranks")[0].at("call").at("state"), "started");
  EXPECT_THAT(report.at("verdict").get<std::string>(), StartsWith("Rank 5 never called"));
}

}  // namespace
}  // namespace lockstep::flight
