// Ranks that fail are started anew, as often as the user allows, and nothing of one attempt affects
// the next.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include <lockstep/launch/rendezvous/messages.h>

#include "ended_for_good.h"
#include "launched.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

std::string contents_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return stream ? std::string(std::istreambuf_iterator<char>(stream), {}) : "absent";
}

TEST(Restart, ALaterAttemptSucceeds) {
  Launched job = Launched::run(
      {"--nproc-per-node", "2", "--max-restarts", "3", "sh", "-c",
       "echo rank $RANK attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS "
       "generation $LOCKSTEP_GENERATION; [ $RANK = 0 ] && exec sleep "
       "0.$TORCHELASTIC_RESTART_COUNT; "
       "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 3"});
  EXPECT_EQ(job.wait(), 0) << job.error();
  for (const char* attempt : {"0", "1", "2"})
    for (const char* rank : {"0", "1"})
      EXPECT_EQ(count_of(std::string("[") + rank + "] rank " + rank + " attempt " + attempt +
                             " of 3 generation " + attempt + "\n",
                         job.output()),
                1)
          << job.output();
  const auto faults = faults_in(job.error());
  ASSERT_THAT(faults, SizeIs(2)) << job.error();
  for (std::size_t i = 0; i < faults.size(); ++i) {
    const auto fault = nlohmann::json::parse(faults[i]);
    EXPECT_EQ(fault["kind"], "exit");
    EXPECT_EQ(fault["rank"], 1);
    EXPECT_EQ(fault["exit_code"], 3);
    EXPECT_EQ(fault["generation"], i);
    EXPECT_EQ(fault["restarted"], true);
  }
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST(Restart, EndsWithTheLastFailureWhereAllAreUsedUp) {
  Launched job = Launched::run({"--nproc-per-node", "2", "--max-restarts", "2", "sh", "-c",
                                "echo started; [ $RANK = 0 ] && exec sleep 30; exit "
                                "$((40 + TORCHELASTIC_RESTART_COUNT))"});
  EXPECT_EQ(job.wait(), 42) << job.error();
  EXPECT_EQ(count_of("[1] started\n", job.output()), 3);
  const auto faults = faults_in(job.error());
  ASSERT_THAT(faults, SizeIs(3));
  EXPECT_EQ(nlohmann::json::parse(faults[1])["restarted"], true);
  EXPECT_EQ(nlohmann::json::parse(faults[2])["restarted"], false);
  EXPECT_THAT(job.error(), HasSubstr("the job failed: rank 1"));
}

TEST(Restart, NothingOfAnAttemptLivesOn) {
  const Folder folder;
  const std::string pids = (folder.path() / "pids").string();
  // One rank has a child in a session of its own whose parent is gone and which ignores polite
  // signals; another rank ignores them itself.
  Launched job = Launched::run(
      {"--nproc-per-node", "2", "--max-restarts", "1", "sh", "-c",
       "if [ $LOCKSTEP_GENERATION = 1 ]; then for p in $(cat " + pids +
           "); do kill -0 $p 2>/dev/null && echo lives on: $p; done; echo looked; exit 0; fi; "
           "trap '' TERM INT HUP; if [ $RANK = 1 ]; then until [ -s " +
           pids + " ]; do sleep 0.01; done; kill -9 $$; fi; (setsid sleep 100 & echo $! >> " +
           pids + ".new); echo $$ >> " + pids + ".new; mv " + pids + ".new " + pids +
           "; while :; do sleep 1; done"});
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_EQ(count_of("looked\n", job.output()), 2);
  EXPECT_THAT(job.output(), Not(HasSubstr("lives on")));
  ASSERT_THAT(faults_in(job.error()), SizeIs(1));
  EXPECT_EQ(nlohmann::json::parse(faults_in(job.error())[0])["signal"], "SIGKILL");
}

TEST(Restart, AGenerationFindsAnEmptyStoreAndAStaleProcessNone) {
  Launched job = Launched::run({"--max-restarts", "1", RANK_PROGRAM, "fence"});
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_THAT(job.output(), HasSubstr("[0] found: nothing\n"));
  EXPECT_THAT(job.output(), HasSubstr("[0] refused: "));
  EXPECT_THAT(job.output(), HasSubstr("serves generation 1 of the job, and this process is of "
                                      "generation 0"));
}

TEST(Restart, NeverAfterAnInterrupt) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Launched job = Launched::run({"--nproc-per-node", "2", "--max-restarts", "5", "sh", "-c",
                                  "echo ready; while :; do sleep 0.05; done"});
    ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready"));
    job.kill(signal);
    EXPECT_EQ(job.wait(), 128 + signal) << job.error();
    EXPECT_EQ(count_of("ready", job.output()), 2);
    ASSERT_THAT(faults_in(job.error()), SizeIs(1));
    EXPECT_EQ(nlohmann::json::parse(faults_in(job.error())[0])["restarted"], false);
  }
}

TEST(Restart, AnInterruptEndsAJobThatIsAboutToRestart) {
  Launched job = Launched::run(
      {"--nproc-per-node", "2", "--max-restarts", "5", "--grace", "60", "sh", "-c",
       "trap 'echo asked to end' TERM; if [ $RANK = 1 ]; then exit 3; fi; echo ready; "
       "while :; do sleep 0.05; done"});
  ASSERT_TRUE(job.says("[0] asked to end")) << job.error();
  job.kill(SIGINT);
  // The rank ignores the first signal and stays.
  job.wait(milliseconds(100));
  job.kill(SIGINT);
  EXPECT_EQ(job.wait(), 128 + SIGINT) << job.error();
  EXPECT_EQ(count_of("ready", job.output()), 1);
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST(Restart, NotWhereItCannotHelp) {
  const Folder folder;
  const std::string plain = folder.write("plain", "neither program nor script\n", 0755);
  Launched job = Launched::run({"--max-restarts", "3", plain});
  EXPECT_EQ(job.wait(), 126);
  EXPECT_THAT(faults_in(job.error()), SizeIs(1));

  EXPECT_TRUE(worth_a_restart({.kind = Failure::Kind::exit, .exit_code = 2}));
  EXPECT_TRUE(worth_a_restart({.kind = Failure::Kind::signal, .exit_code = 130}));
  EXPECT_TRUE(worth_a_restart({.kind = Failure::Kind::node_lost}));
  EXPECT_FALSE(worth_a_restart({.kind = Failure::Kind::interrupted, .exit_code = 7}));
  EXPECT_FALSE(worth_a_restart({.kind = Failure::Kind::exit, .exit_code = 2, .final = true}));
}

TEST(Restart, NotWhereTheRankSaysThatItCannotHelp) {
  Launched job =
      Launched::run({"--nproc-per-node", "2", "--max-restarts", "3", RANK_PROGRAM, "final"});
  EXPECT_EQ(job.wait(), 9) << job.error();
  const auto faults = faults_in(job.error());
  ASSERT_THAT(faults, SizeIs(1)) << job.error();
  const auto fault = nlohmann::json::parse(faults[0]);
  EXPECT_EQ(fault["kind"], "exit");
  EXPECT_EQ(fault["exit_code"], 9);
  expect_ended_for_good(job, 1);

  // If no restart was left, there is nothing to explain.
  Launched without = Launched::run({RANK_PROGRAM, "final"});
  EXPECT_EQ(without.wait(), 9) << without.error();
  EXPECT_THAT(without.error(), Not(HasSubstr("no restart is made")));
}

// One rank ends because another is gone, and that one says a moment later why it went.
TEST(Restart, TheRankThatKnowsWhyCountsMoreThanOneThatNoticed) {
  Launched job = Launched::run(
      {"--nproc-per-node", "2", "--max-restarts", "3", "sh", "-c",
       std::string("[ $RANK = 0 ] && exit 1; sleep 0.02; exec ") + RANK_PROGRAM + " final"});
  EXPECT_EQ(job.wait(), 9) << job.error();
  const auto faults = faults_in(job.error());
  ASSERT_FALSE(faults.empty()) << job.error();
  EXPECT_EQ(nlohmann::json::parse(faults.back())["rank"], 1);
}

// Rank 0 aborts when rank 1 has said that a restart would not help, as a program does that waits
// for rank 1 in a call and catches nothing. Rank 1 ends when there is a file "go" in the folder.
Launched abort_beside_one_that_knows(const Folder& folder, const std::string& grace) {
  const std::string file = (folder.path() / "go").string();
  return Launched::run(
      {"--nproc-per-node", "2", "--max-restarts", "3", "--grace", grace, "sh", "-c",
       "ulimit -c 0; [ $RANK = 1 ] && exec " + std::string(RANK_PROGRAM) + " final " + file +
           "; until [ -e " + file + ".said ]; do sleep 0.01; done; kill -ABRT $$"});
}

TEST(Restart, TheRankThatKnowsWhyCountsMoreThanOneThatAborts) {
  const Folder folder;
  folder.write("go", "");
  Launched job = abort_beside_one_that_knows(folder, "60");
  EXPECT_EQ(job.wait(), 9) << job.error();
  expect_ended_for_good(job, 1);
}

TEST(Restart, TheRankThatKnowsWhyCountsMoreThanOneThatAbortedBefore) {
  const Folder folder;
  Launched job = abort_beside_one_that_knows(folder, "60");
  ASSERT_TRUE(eventually(milliseconds(60'000), [&] {
    return job.error().find("rank 0 (") != std::string::npos;
  })) << job.error();
  folder.write("go", "");
  EXPECT_EQ(job.wait(), 9) << job.error();
  expect_ended_for_good(job, 1);
}

TEST(Restart, TheRankThatKnowsWhyMayBeKilledBeforeItEnds) {
  const Folder folder;
  Launched job = abort_beside_one_that_knows(folder, "0.2");
  EXPECT_EQ(job.wait(), 128 + SIGKILL) << job.error();
  expect_ended_for_good(job, 1);
}

// A program may take the order to end for an error that it cannot mend.
TEST(Restart, WhatARankSaysWhenItIsToldToEndDoesNotCount) {
  const Folder folder;
  const std::string ready = (folder.path() / "ready").string();
  Launched job = Launched::run(
      {"--nproc-per-node", "2", "--max-restarts", "1", "--grace", "60", "sh", "-c",
       "ulimit -c 0; [ $LOCKSTEP_GENERATION = 1 ] && exit 0; if [ $RANK = 0 ]; then until [ -e " +
           ready + " ]; do sleep 0.01; done; kill -ABRT $$; fi; trap 'exec " + RANK_PROGRAM +
           " final' TERM; touch " + ready + "; while :; do sleep 0.02; done"});
  EXPECT_EQ(job.wait(), 0) << job.error();
  const auto faults = faults_in(job.error());
  ASSERT_THAT(faults, SizeIs(1)) << job.error();
  EXPECT_EQ(nlohmann::json::parse(faults[0])["rank"], 0);
}

TEST(Restart, EachAttemptHasItsLogs) {
  const Folder folder;
  Launched job = Launched::run(
      {"--max-restarts", "1", "--log-dir", folder.path().string(), "--rdzv-id", "it", "--tee", "3",
       "sh", "-c", "echo attempt $TORCHELASTIC_RESTART_COUNT; exit $((1 - LOCKSTEP_GENERATION))"});
  ASSERT_EQ(job.wait(), 0) << job.error();
  std::filesystem::path run;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) run = entry.path();
  EXPECT_EQ(contents_of(run / "attempt_0" / "0" / "stdout.log"), "attempt 0\n");
  EXPECT_EQ(contents_of(run / "attempt_1" / "0" / "stdout.log"), "attempt 1\n");
  EXPECT_THAT(job.error(), HasSubstr("logs are in " + (run / "attempt_0").string()));
}

TEST(Restart, DumpsOfAttemptsAreKeptApart) {
  const Folder folder;
  Launched job = Launched::run({"--max-restarts", "2", "sh", "-c",
                                "touch $LOCKSTEP_FLIGHT_DIR/dump-$LOCKSTEP_GENERATION; ls "
                                "$LOCKSTEP_FLIGHT_DIR; exit $((2 - LOCKSTEP_GENERATION))"},
                               {"LOCKSTEP_FLIGHT_DIR=" + folder.path().string()});
  ASSERT_EQ(job.wait(), 0) << job.error();
  EXPECT_EQ(job.output(), "[0] dump-0\n[0] dump-1\n[0] dump-2\n");
}

TEST(Restart, AKilledGuardianEndsTheJob) {
  Launched job = Launched::run({"--max-restarts", "3", "sh", "-c", "echo ready; sleep 100"});
  ASSERT_TRUE(job.says("[0] ready"));
  for (const pid_t pid : job.alive())
    if (contents_of("/proc/" + std::to_string(pid) + "/comm") == "lockstep-guard\n")
      ::kill(pid, SIGKILL);
  EXPECT_EQ(job.wait(), 1) << job.error();
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
  EXPECT_EQ(count_of("ready", job.output()), 1);
}

}  // namespace
}  // namespace lockstep::launch::testing
