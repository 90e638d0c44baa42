// `lockstep check hang`, as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <lockstep/flight/journal.h>
#include <lockstep/flight/report.h>

#include "launched.h"

namespace lockstep::cli {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Launched check_hang(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {LOCKSTEP_PROGRAM, "check", "hang"});
  return Launched(std::move(arguments));
}

std::shared_ptr<flight::Recorder> recorder(int rank, std::uint64_t calls, flight::State last) {
  auto made = std::make_shared<flight::Recorder>("world", rank, std::vector<int>{0, 1}, nullptr);
  for (std::uint64_t sequence = 1; sequence <= calls; ++sequence) {
    const auto call = made->record(
        {.sequence = sequence, .operation = "barrier", .file = "/a/train.cpp", .line = 42});
    made->mark(call, flight::State::started);
    made->mark(call, sequence == calls ? last : flight::State::finished);
  }
  return made;
}

TEST(CheckHang, TellsFromDumpsWhoIsMissing) {
  const Folder folder;
  const flight::Cause cause{.reason = "too long", .fault = "timeout", .at_fault = {1}};
  flight::write_dump(*recorder(0, 3, flight::State::failed), folder.path(), cause);
  flight::write_dump(*recorder(1, 2, flight::State::finished), folder.path(), {});
  Launched text = check_hang({folder.path().string()});
  EXPECT_EQ(text.wait(), 1) << text.error();
  EXPECT_THAT(text.output(),
              StartsWith("Rank 1 never called barrier #3 of group 'world' (train.cpp:42)"));
  EXPECT_THAT(text.output(), HasSubstr("rank 0 gave up because: too long"));
  Launched json = check_hang({"--json", folder.path().string()});
  EXPECT_EQ(json.wait(), 1) << json.error();
  const auto report = nlohmann::json::parse(json.output());
  EXPECT_EQ(report.at("findings")[0].at("ranks"), std::vector<int>{1});
  EXPECT_TRUE(report.at("left_out").empty());
}

TEST(CheckHang, NothingHangs) {
  const Folder folder;
  for (const int rank : {0, 1})
    flight::write_dump(*recorder(rank, 2, flight::State::finished), folder.path(), {});
  Launched check = check_hang({folder.path().string()});
  EXPECT_EQ(check.wait(), 0) << check.error();
  EXPECT_THAT(check.output(), StartsWith("Nothing hangs"));
}

// This process plays both ranks of a job that is running.
TEST(CheckHang, AsksARunningJob) {
  const Folder folder;
  flight::Journal first(folder.path());
  flight::Journal second(folder.path());
  const auto zero = recorder(0, 3, flight::State::started);
  const auto one = recorder(1, 2, flight::State::finished);
  first.add(zero);
  second.add(one);
  second.note_progress(7, "backward");
  Launched before = check_hang({folder.path().string()});
  EXPECT_EQ(before.wait(), 2);
  EXPECT_THAT(before.error(), HasSubstr("has no dumps"));
  EXPECT_THAT(before.error(), HasSubstr("--now"));
  Launched now = check_hang({"--now", folder.path().string()});
  EXPECT_GE(now.wait(), 0) << now.error();
  EXPECT_THAT(now.output(), HasSubstr("Rank 1 never called barrier #3"));
  EXPECT_THAT(now.output(), HasSubstr("in step 7 (backward)"));
}

TEST(CheckHang, MistakesAreNamed) {
  Launched nothing = check_hang({});
  EXPECT_EQ(nothing.wait(), 2);
  EXPECT_THAT(nothing.error(), HasSubstr("LOCKSTEP_FLIGHT_DIR"));
  Launched nowhere = check_hang({"/no/such/folder"});
  EXPECT_EQ(nowhere.wait(), 2);
  EXPECT_THAT(nowhere.error(), HasSubstr("'/no/such/folder' is no folder"));
  Launched help = check_hang({"--help"});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.output(), HasSubstr("--now"));
  const Folder folder;
  folder.write("flight-x.json", "no dump");
  Launched bad = check_hang({folder.path().string()});
  EXPECT_EQ(bad.wait(), 2);
  EXPECT_THAT(bad.error(), HasSubstr("flight-x.json"));
}

}  // namespace
}  // namespace lockstep::cli
