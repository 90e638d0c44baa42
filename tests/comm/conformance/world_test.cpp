// Jobs that go wrong, from launch to report.
#include <filesystem>
#include <regex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/flight/report.h>
#include <lockstep/net/secret.h>
#include <lockstep/net/socket.h>
#include <lockstep/store/server.h>

#include "../../launch/launched.h"

namespace lockstep::comm::conformance {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using launch::testing::this_program;
using ::testing::AllOf;
using ::testing::HasSubstr;

Launched start(const std::string& scenario, const Folder& flight) {
  return Launched::run(
      {"--standalone", "--nproc-per-node", "3", this_program(), "--scenario", scenario},
      {"LOCKSTEP_FLIGHT_DIR=" + flight.path().string()});
}

// Starts a single rank, whose environment describes a job.
Launched start_alone(std::vector<std::string> variables) {
  variables.insert(variables.end(), {"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2",
                                     "MASTER_ADDR=127.0.0.1"});
  variables.push_back("MASTER_PORT=" + std::to_string(net::free_port("127.0.0.1")));
  return Launched({this_program(), "--scenario", "absent-store"}, std::move(variables));
}

TEST(World, TheMergedReportSaysWhoIsBehind) {
  const Folder flight;
  Launched job = start("behind", flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  EXPECT_THAT(job.output(), HasSubstr("timeout of rank 1"));
  const std::string report = flight::merged_report(flight.path());
  EXPECT_THAT(report, AllOf(HasSubstr("group 'world' (3 ranks)"), HasSubstr("all_reduce #"),
                            HasSubstr("scenarios.cpp:"), HasSubstr("rank 1")))
      << report;
  EXPECT_EQ(report.find("does not match"), std::string::npos) << report;
  // The report is printed without being asked for.
  EXPECT_THAT(job.error(), HasSubstr("group 'world' (3 ranks)"));
  EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
}

TEST(World, AProgramsOwnBackendIsChosenByItsName) {
  const Folder flight;
  Launched job = start("own-backend", flight);
  EXPECT_EQ(job.wait(), 0) << job.output() << job.error();
  for (const std::string rank : {"[0] ", "[1] ", "[2] "})
    EXPECT_THAT(job.output(), HasSubstr(rank + "over counting-tcp: a sum of 3, counted"));
}

TEST(World, AMismatchIsCaughtOnEveryRankAndTheGroupStaysDead) {
  const Folder flight;
  Launched job = start("mismatch", flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  for (const std::string rank : {"[0] ", "[1] ", "[2] "}) {
    EXPECT_THAT(job.output(), HasSubstr(rank + "caught "));
    EXPECT_THAT(job.output(), HasSubstr(rank + "ended by "));
  }
  EXPECT_THAT(job.output(), AllOf(HasSubstr("mismatch of ranks"), HasSubstr("broadcast #"),
                                  HasSubstr("all_reduce #")));
  EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
}

// The calls differ only in the hash of the lengths.
TEST(World, ListsThatAreCutDifferentlyDoNotMatch) {
  const Folder flight;
  Launched job = start("lengths", flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  const std::string call = R"(all_gather #[0-9]+ \(9 float32 in 3 tensors of lengths \[)";
  for (const std::string& line : launch::testing::lines_of(job.output())) {
    EXPECT_THAT(line, HasSubstr("ended by "));
    EXPECT_THAT(line, HasSubstr("mismatch of ranks"));
    std::smatch found;
    ASSERT_TRUE(std::regex_search(
        line, found, std::regex(call + "([0-9a-f]{4})\\].*" + call + "([0-9a-f]{4})\\]")))
        << line;
    EXPECT_NE(found[1], found[2]) << line;
  }
  EXPECT_EQ(launch::testing::lines_of(job.output()).size(), 3u) << job.output();
}

TEST(World, PartsOfAnAllToAllThatDoNotFitDoNotMatch) {
  const Folder flight;
  Launched job = start("too-much", flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  for (const std::string rank : {"[0] ", "[1] ", "[2] "})
    EXPECT_THAT(job.output(), HasSubstr(rank + "ended by "));
  EXPECT_THAT(job.output(), AllOf(HasSubstr("mismatch of ranks 1 and 2"), HasSubstr("all_to_all #"),
                                  HasSubstr("24 bytes"), HasSubstr("20")));
}

TEST(World, AKilledRankIsNamed) {
  const Folder flight;
  Launched job = start("die", flight);
  EXPECT_EQ(job.wait(), 137) << job.output() << job.error();
  EXPECT_THAT(job.output(), AllOf(HasSubstr("[0] ended by "), HasSubstr("[1] ended by "),
                                  HasSubstr("peer lost of rank 2")));
  EXPECT_THAT(job.error(), HasSubstr("rank 2 (local rank 2"));
  EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
}

TEST(World, ARankThatNeverJoinsIsNamed) {
  const Folder flight;
  Launched job = start("absent", flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  EXPECT_THAT(job.output(),
              AllOf(HasSubstr("join"), HasSubstr("timeout of rank 1"), HasSubstr("1.0 s")));
}

TEST(World, AWrongSecretIsRefused) {
  const Folder folder;
  const store::Server server({.host = "127.0.0.1", .port = 0}, net::Secret::random());
  Launched rank =
      start_alone({"LOCKSTEP_STORE=" + server.address().text(),
                   "LOCKSTEP_SECRET_FILE=" + folder.write("secret", std::string(32, 'x'), 0600)});
  const auto begin = Clock::now();
  EXPECT_EQ(rank.wait(), 3) << rank.error();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(15));
  EXPECT_THAT(rank.output(), AllOf(HasSubstr("refused"), HasSubstr("secret")));
}

TEST(World, AHostThatDoesNotExistIsNamed) {
  const Folder folder;
  Launched rank =
      start_alone({"LOCKSTEP_STORE=no-such-host.invalid:29511",
                   "LOCKSTEP_SECRET_FILE=" + folder.write("secret", std::string(32, 'x'), 0600)});
  const auto begin = Clock::now();
  EXPECT_EQ(rank.wait(), 3) << rank.error();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(15));
  EXPECT_THAT(rank.output(), HasSubstr("no-such-host.invalid"));
}

}  // namespace
}  // namespace lockstep::comm::conformance
