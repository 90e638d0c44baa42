#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

#include "variables.h"

namespace lockstep {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override { variables_.unset("LOCKSTEP_LOG"); }

  // Logs one line at each level.
  static std::string all_levels() {
    ::testing::internal::CaptureStderr();
    log::trace("a {}", "trace");
    log::debug("a {}", "debug");
    log::info("a {}", "info");
    log::warn("a {}", "warning");
    log::error("an {}", "error");
    return ::testing::internal::GetCapturedStderr();
  }

  Variables variables_;
};

TEST_F(LogTest, RankZeroSpeaksAtInfo) {
  log::set_rank(0, 8);
  const auto text = all_levels();
  EXPECT_THAT(text, ContainsRegex("I [0-9:.]+ \\[rank 0\\] a info\n"));
  EXPECT_THAT(text, ContainsRegex("W [0-9:.]+ \\[rank 0\\] a warning\n"));
  EXPECT_THAT(text, ContainsRegex("E [0-9:.]+ \\[rank 0\\] an error\n"));
  EXPECT_THAT(text, Not(HasSubstr("debug")));
}

TEST_F(LogTest, OtherRanksSpeakFromWarningOn) {
  log::set_rank(7, 128);
  const auto text = all_levels();
  EXPECT_THAT(text, HasSubstr("[rank   7] a warning\n"));
  EXPECT_THAT(text, HasSubstr("[rank   7] an error\n"));
  EXPECT_THAT(text, Not(HasSubstr("info")));
}

TEST_F(LogTest, TheVariableSetsTheLevelOfAll) {
  variables_.set("LOCKSTEP_LOG", "debug");
  log::set_rank(7, 8);
  EXPECT_THAT(all_levels(), HasSubstr("[rank 7] a debug\n"));
  variables_.set("LOCKSTEP_LOG", "error");
  log::set_rank(0, 8);
  const auto text = all_levels();
  EXPECT_THAT(text, HasSubstr("an error\n"));
  EXPECT_THAT(text, Not(HasSubstr("warning")));
  variables_.set("LOCKSTEP_LOG", "off");
  log::set_rank(0, 8);
  EXPECT_THAT(all_levels(), IsEmpty());
}

TEST_F(LogTest, AnUnknownLevelIsAnErrorThatNamesTheVariable) {
  variables_.set("LOCKSTEP_LOG", "loud");
  try {
    log::set_rank(0, 1);
    FAIL() << "it was accepted";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("LOCKSTEP_LOG is 'loud'"));
  }
}

TEST_F(LogTest, ProgramsThatAreNoRankHaveAName) {
  log::set_name("lockstep run");
  EXPECT_THAT(all_levels(), HasSubstr("[lockstep run] a info\n"));
}

TEST_F(LogTest, PlainTextsAreTakenAsTheyAre) {
  log::set_rank(0, 1);
  ::testing::internal::CaptureStderr();
  log::info(std::string("braces {} and {0}"));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("braces {} and {0}\n"));
}

TEST_F(LogTest, TheProgramsOwnLoggerIsLeftAlone) {
  const auto theirs = spdlog::default_logger();
  const auto level = theirs->level();
  log::set_rank(1, 2);
  EXPECT_EQ(spdlog::default_logger(), theirs);
  EXPECT_EQ(theirs->level(), level);
}

TEST_F(LogTest, RanksMayBeSetWhileOthersSpeak) {
  ::testing::internal::CaptureStderr();
  std::thread speaking([] {
    for (int i = 0; i < 200; ++i) log::warn("line {}", i);
  });
  for (int i = 0; i < 50; ++i) log::set_rank(i, 50);
  speaking.join();
  const auto text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 200);
  EXPECT_THAT(text, HasSubstr("line 199\n"));
}

}  // namespace
}  // namespace lockstep
