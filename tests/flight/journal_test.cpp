#include <lockstep/flight/journal.h>

#include <array>
#include <cstdlib>
#include <fstream>

#include <sys/socket.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/environment.h>
#include <lockstep/flight/dump.h>
#include <lockstep/flight/report.h>
#include <lockstep/launch/rank_side/launcher_line.h>

namespace lockstep::flight {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr milliseconds kLongest(20'000);

class JournalTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "lockstep-journal-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  // The dumps of all ranks that have answered this demand.
  std::vector<Dump> answers() { return demand_evidence(directory_, kLongest).dumps; }

  static std::shared_ptr<Recorder> recorder(const std::string& group, int rank) {
    return std::make_shared<Recorder>(group, rank, std::vector<int>{0, 1}, nullptr);
  }

  fs::path directory_;
};

TEST_F(JournalTest, WithoutADirectoryNothingIsWritten) {
  Journal journal;
  const auto world = recorder("world", 0);
  journal.add(world);
  journal.note_progress(3);
  journal.group_failed(*world, {.reason = "x"}, Journal::FoundBy::this_rank);
  EXPECT_FALSE(fs::exists("demand"));
}

// The launcher needs this to tell which rank failed first.
TEST_F(JournalTest, AFailureTellsTheLauncherWhomItBlames) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
  set_environment("LOCKSTEP_LINE_FD", std::to_string(ends[1]).c_str());
  Journal journal;
  const auto tp = std::make_shared<Recorder>("tp", 1, std::vector<int>{4, 6}, nullptr);
  const auto heard = [&]() -> std::vector<int> {
    std::array<char, 256> packet;
    const auto got = ::recv(ends[0], packet.data(), packet.size(), MSG_DONTWAIT);
    if (got <= 0) return {};
    const auto message = LineMessage::decode({packet.data(), static_cast<std::size_t>(got)});
    EXPECT_EQ(message->word, LineMessage::Word::blames);
    EXPECT_EQ(Blame::of(*message).fault, "peer lost");
    return Blame::of(*message).ranks;
  };
  const auto fail = [&](std::vector<int> at_fault) {
    journal.group_failed(*tp,
                         {.reason = "why", .fault = "peer lost", .at_fault = std::move(at_fault)},
                         Journal::FoundBy::another);
    return heard();
  };
  EXPECT_THAT(fail({4, 12}), testing::ElementsAre(4, 12));
  EXPECT_THAT(fail({4, 6}), testing::IsEmpty()) << "it is one of them";
  EXPECT_THAT(fail({}), testing::IsEmpty());
  set_environment("LOCKSTEP_LINE_FD", "");
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(JournalTest, AFailureIsWrittenOfEveryGroupByEveryProcess) {
  Journal first(directory_);
  Journal second(directory_);  // stands for a process that computes
  const auto world = recorder("world", 0);
  const auto tp = recorder("tp", 0);
  const auto others = recorder("world", 1);
  first.add(world);
  first.add(tp);
  second.add(others);
  second.note_progress(12, "forward");
  tp->mark(tp->record({.sequence = 1, .operation = "barrier"}), State::failed);
  first.group_failed(*tp, {.reason = "why", .fault = "timeout", .at_fault = {1}},
                     Journal::FoundBy::this_rank);
  const auto there = [&](int rank) {
    for (const auto& path : list_dumps(directory_))
      if (path.string().find(fmt::format("rank{}.json", rank)) != std::string::npos) return true;
    return false;
  };
  EXPECT_TRUE(there(0));
  const Deadline deadline = Deadline::after(kLongest);
  while (!there(1) && !deadline.passed()) std::this_thread::yield();
  const Evidence evidence = read_evidence(directory_);
  ASSERT_EQ(evidence.dumps.size(), 3u);
  EXPECT_THAT(evidence.left_out, testing::IsEmpty());
  for (const Dump& dump : evidence.dumps) {
    if (dump.group == "tp") {
      EXPECT_EQ(dump.cause.reason, "why");
      EXPECT_EQ(dump.cause.fault, "timeout");
      EXPECT_EQ(dump.cause.at_fault, std::vector<int>{1});
    } else if (dump.rank == 0) {
      EXPECT_EQ(dump.cause.reason, "group 'tp' failed: why");
      EXPECT_EQ(dump.cause.fault, "");
    } else {
      EXPECT_THAT(dump.cause.reason, HasSubstr("on another rank"));
      ASSERT_TRUE(dump.progress);
      EXPECT_EQ(dump.progress->step, 12u);
      EXPECT_EQ(dump.progress->phase, "forward");
      EXPECT_LE(dump.progress->noted_ns, dump.now_ns);
    }
  }
}

// The dump from the moment of a rank's failure counts, also if dumps are demanded later.
TEST_F(JournalTest, AFailuresCauseStays) {
  Journal journal(directory_);
  const auto world = std::make_shared<Recorder>("world", 0, std::vector<int>{0}, nullptr);
  journal.add(world);
  journal.group_failed(*world, {.reason = "first", .fault = "mismatch"},
                       Journal::FoundBy::this_rank);
  journal.group_failed(*world, {.reason = "second", .fault = "aborted"}, Journal::FoundBy::another);
  const auto dumps = answers();
  ASSERT_EQ(dumps.size(), 1u);
  EXPECT_EQ(dumps[0].cause.reason, "first");
  EXPECT_EQ(dumps[0].cause.fault, "mismatch");
}

TEST_F(JournalTest, WhoeverAsksIsAnswered) {
  Journal first(directory_);
  Journal second(directory_);
  const auto zero = recorder("world", 0);
  const auto one = recorder("world", 1);
  first.add(zero);
  second.add(one);
  zero->mark(zero->record({.sequence = 1, .operation = "barrier"}), State::started);
  EXPECT_EQ(answers().size(), 2u);
  one->mark(one->record({.sequence = 1, .operation = "barrier"}), State::started);
  const auto dumps = answers();
  ASSERT_EQ(dumps.size(), 2u);
  for (const Dump& dump : dumps) {
    EXPECT_EQ(dump.last_sequence, 1u);
    EXPECT_EQ(dump.cause.fault, "");
  }
}

TEST_F(JournalTest, AGroupThatIsGoneIsNotWritten) {
  Journal journal(directory_);
  const auto kept = std::make_shared<Recorder>("kept", 0, std::vector<int>{0}, nullptr);
  auto gone = std::make_shared<Recorder>("gone", 0, std::vector<int>{0}, nullptr);
  journal.add(gone);
  journal.add(kept);
  gone.reset();
  EXPECT_EQ(answers().size(), 1u);
}

// A rank that answered an earlier demand but not the newest is stopped: its old dump is out of
// date.
TEST_F(JournalTest, OldDumpsAreLeftOut) {
  Dump old = take_dump(*recorder("world", 1), {.reason = "long ago"});
  old.as_of_ns = wall_clock_ns() - 60'000'000'000;
  ASSERT_TRUE(write_dump(old, directory_));
  Journal journal(directory_);
  const auto zero = recorder("world", 0);
  journal.add(zero);
  zero->mark(zero->record({.sequence = 1, .operation = "barrier"}), State::started);
  journal.group_failed(*zero, {.reason = "x", .fault = "timeout"}, Journal::FoundBy::this_rank);
  const Evidence evidence = read_evidence(directory_);
  ASSERT_EQ(evidence.dumps.size(), 1u);
  ASSERT_EQ(evidence.left_out.size(), 1u);
  EXPECT_THAT(evidence.left_out[0], HasSubstr("a dump of rank 1 from 20"));
  EXPECT_THAT(merged_report(evidence), testing::StartsWith("Rank 1 left no dump"));
}

// A demand that an earlier job left is not one of this job.
TEST_F(JournalTest, WhatIsThereBeforeIsNoDemand) {
  ASSERT_NE(demand_dumps(directory_, Demand::Why::failed, 5), 0);
  Journal first(directory_);
  Journal second(directory_);
  const auto zero = recorder("world", 0);
  const auto one = recorder("world", 1);
  first.add(zero);
  second.add(one);
  first.group_failed(*zero, {.reason = "x"}, Journal::FoundBy::this_rank);
  const Deadline deadline = Deadline::after(kLongest);
  while (list_dumps(directory_).size() < 2 && !deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(list_dumps(directory_).size(), 2u);
}

TEST_F(JournalTest, ADemandIsReadWithSuspicion) {
  EXPECT_FALSE(current_demand(directory_));
  for (const std::string text :
       {"", "asked", "asked 0", "asked x 5", "else 0 5", "asked 0 -5", "asked -1 x"}) {
    std::ofstream(directory_ / kDemandFile) << text;
    EXPECT_FALSE(current_demand(directory_)) << text;
  }
  std::ofstream(directory_ / kDemandFile) << "failed 3 5\n";
  const auto demand = current_demand(directory_);
  ASSERT_TRUE(demand);
  EXPECT_EQ(demand->why, Demand::Why::failed);
  EXPECT_EQ(demand->generation, 3u);
  EXPECT_EQ(demand->round, 5);
  EXPECT_EQ(demand_dumps(directory_ / "none"), 0);
}

}  // namespace
}  // namespace lockstep::flight
