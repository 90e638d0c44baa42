#include <lockstep/flight/report.h>

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::flight {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr std::int64_t kSecond = 1'000'000'000;

// A rank's dump, in seconds before the dump. Each rank's clock has an origin of its own.
class Rank {
 public:
  Rank(int rank, int num_ranks, std::string group = "world") {
    dump_.group = std::move(group);
    dump_.rank = rank;
    dump_.members.resize(static_cast<std::size_t>(num_ranks));
    std::iota(dump_.members.begin(), dump_.members.end(), 0);
    dump_.now_ns = (1000 + 5000 * rank) * kSecond;
    dump_.reason = "test";
  }

  Rank& call(std::uint64_t sequence, std::string summary, std::string site, State state,
             double seconds_ago) {
    Entry entry;
    entry.number = dump_.entries.size() + 1;
    entry.sequence = sequence;
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
  EXPECT_EQ(merged_report(dumps),
            "group 'world' (4 ranks):\n"
            "  ranks 0-3 are in all_reduce #7 (sum of 1024 float32) called at train.cpp:42, for "
            "5.0 s\n"
            "  ranks 0-3 gave up because: test\n");
}

TEST(Report, OneIsBehind) {
  const std::string report = merged_report(
      {Rank(0, 4).finished_barrier(9).in_all_reduce(), Rank(1, 4).in_all_reduce(),
       Rank(2, 4).finished_barrier(7.2), Rank(3, 4).in_all_reduce(State::started, 4.8)});
  EXPECT_THAT(report, HasSubstr("ranks 0, 1 and 3 are in all_reduce #7 (sum of 1024 float32) "
                                "called at train.cpp:42, for 4.8 to 5.0 s\n"));
  EXPECT_THAT(report, HasSubstr("rank 2 is behind: its last call, barrier #6 called at "
                                "train.cpp:40, finished 7.2 s ago; it never called #7\n"));
  EXPECT_THAT(report, Not(HasSubstr("no word")));
  EXPECT_THAT(report, Not(HasSubstr("does not match")));
}

TEST(Report, FailedCallsSayHowLongTheyTook) {
  const std::string report =
      merged_report({Rank(0, 2).in_all_reduce(State::failed, 5), Rank(1, 2).finished_barrier(6)});
  EXPECT_THAT(report, HasSubstr("rank 0 failed in all_reduce #7 (sum of 1024 float32) called at "
                                "train.cpp:42 after 5.0 s\n"));
  EXPECT_THAT(report, HasSubstr("rank 1 is behind"));
}

// Calls queued behind the one that is stuck do not make the others look behind.
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
              HasSubstr("call #7 does not match: rank 1 called broadcast #7 (8 int64 from rank 0) "
                        "at eval.cpp:9 while ranks 0 and 2 called all_reduce #7 (sum of "
                        "1024 float32) at train.cpp:42\n"));
}

TEST(Report, OnlyTheFirstMismatchIsSaid) {
  Rank skipped = Rank(0, 2).call(6, "all_gather #6", "a.cpp:1", State::finished, 1);
  skipped.call(7, "barrier #7", "a.cpp:2", State::started, 1);
  const std::string report =
      merged_report({skipped, Rank(1, 2).finished_barrier(1).in_all_reduce()});
  EXPECT_THAT(report, HasSubstr("call #6 does not match"));
  EXPECT_THAT(report, Not(HasSubstr("call #7 does not match")));
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
  EXPECT_THAT(report, HasSubstr("ranks 0 and 1 have finished barrier #6 called at train.cpp:40, "
                                "2.0 to 3.0 s ago\n"));
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
  EXPECT_THAT(report, Not(HasSubstr("does not match")));
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
  Dump sub = Rank(1, 2, "tp").in_all_reduce();
  sub.members = {2, 3};
  sub.generation = 4;
  const std::string report = merged_report({Rank(0, 1).finished_barrier(1), sub});
  EXPECT_THAT(report,
              testing::StartsWith("group 'tp' (2 ranks: global ranks 2 and 3; generation 4):\n"));
  EXPECT_THAT(report, HasSubstr("no word from rank 0"));
  EXPECT_THAT(report, HasSubstr("group 'world' (1 rank):\n  rank 0 has finished barrier #6"));
}

}  // namespace
}  // namespace lockstep::flight
