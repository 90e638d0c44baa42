// One rank's failure ends the job, and nothing is left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include <lockstep/flight/dump.h>
#include <lockstep/launch/rendezvous/messages.h>

#include "launched.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Generous to a busy machine: the promise is one second, and if it is broken, ranks go on forever.
constexpr milliseconds kSoon(15'000);

nlohmann::json fault_of(const Launched& job) {
  for (const std::string& line : lines_of(job.error())) {
    const std::string start = "lockstep: fault ";
    if (line.starts_with(start)) return nlohmann::json::parse(line.substr(start.size()));
  }
  return nullptr;
}

TEST(Failure, ExitCodeOfTheFirstRankThatFailed) {
  const auto begin = Clock::now();
  // The other ranks would go on forever and ignore polite signals.
  Launched job =
      Launched::run({"--nproc-per-node", "3", "sh", "-c",
                     "trap '' TERM INT; if [ $RANK = 1 ]; then for i in $(seq 30); do echo "
                     "last words $i; done; exit 37; fi; while :; do sleep 1; done"});
  EXPECT_EQ(job.wait(), 37);
  EXPECT_LT(Clock::now() - begin, kSoon);
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
  EXPECT_THAT(job.error(), HasSubstr("rank 1 (local rank 1 on host "));
  EXPECT_THAT(job.error(), HasSubstr("ended with exit code 37"));
  EXPECT_THAT(job.error(), HasSubstr("  | last words 30\n"));
  EXPECT_THAT(job.error(), Not(HasSubstr("  | last words 20\n")));
  const auto fault = fault_of(job);
  ASSERT_TRUE(fault.is_object()) << job.error();
  EXPECT_EQ(fault["kind"], "exit");
  EXPECT_EQ(fault["rank"], 1);
  EXPECT_EQ(fault["local_rank"], 1);
  EXPECT_EQ(fault["exit_code"], 37);
  EXPECT_FALSE(fault["host"].get<std::string>().empty());
}

TEST(Failure, EverySignalHasItsName) {
  for (const int signal : {SIGKILL, SIGTERM, SIGABRT, SIGSEGV, SIGFPE, SIGBUS, SIGILL, SIGINT}) {
    Launched job = Launched::run({"--nproc-per-node", "2", "sh", "-c",
                                  "ulimit -c 0; if [ $RANK = 1 ]; then kill -" +
                                      std::to_string(signal) + " $$; fi; sleep 30"});
    EXPECT_EQ(job.wait(), 128 + signal);
    const auto fault = fault_of(job);
    ASSERT_TRUE(fault.is_object()) << job.error();
    EXPECT_EQ(fault["kind"], "signal");
    EXPECT_EQ(fault["rank"], 1);
    EXPECT_EQ(fault["signal"], signal_name(signal));
    EXPECT_EQ(fault["exit_code"], 128 + signal);
    EXPECT_TRUE(job.all_gone(milliseconds(0)));
  }
  EXPECT_EQ(signal_name(SIGKILL), "SIGKILL");
}

TEST(Failure, GraceLetsRanksFinish) {
  Launched job = Launched::run({"--nproc-per-node", "2", "--grace", "20", "sh", "-c",
                                "trap 'sleep 1.2; echo saved; exit 0' TERM; if [ $RANK = 1 ]; then "
                                "sleep 0.3; exit 3; fi; while :; do sleep 0.05; done"});
  EXPECT_EQ(job.wait(), 3);
  EXPECT_THAT(job.output(), HasSubstr("[0] saved\n"));
}

// Measured by the launcher itself: a machine that is slow to run the ranks cannot make the time
// shorter.
TEST(Failure, PeersHaveTimeToSayWhatTheySaw) {
  const Folder folder;
  const std::string ready = (folder.path() / "ready").string();
  Launched job = Launched::run(
      {"--nproc-per-node", "2", "--grace", "20", "sh", "-c",
       "now() { cut -d ' ' -f 1 /proc/uptime; }; if [ $RANK = 1 ]; then until [ -e " + ready +
           " ]; do sleep 0.01; done; echo left at $(now); exit 3; fi; trap 'echo told to end at "
           "$(now); exit 1' TERM; touch " +
           ready + "; while :; do sleep 0.02; done"});
  EXPECT_EQ(job.wait(), 3) << job.error();
  double left = 0, told = 0;
  for (const std::string& line : lines_of(job.output())) {
    std::sscanf(line.c_str(), "[1] left at %lf", &left);
    std::sscanf(line.c_str(), "[0] told to end at %lf", &told);
  }
  ASSERT_GT(left, 0) << job.output();
  ASSERT_GT(told, 0) << job.output();
  EXPECT_GE(told - left, 0.2) << "others notice a lost rank within that";
}

// Whichever process ends first, the ranks say which one they lost.
TEST(Failure, TheRankThatOthersLostIsNamedThoughItEndsLast) {
  for (const std::string how : {"exit", "abort"}) {
    const Folder folder;
    Launched job = Launched::run(
        {"--nproc-per-node", "4", "sh", "-c",
         "ulimit -c 0; exec " RANK_PROGRAM " follow " + folder.path().string() + " " + how});
    EXPECT_EQ(job.wait(), 7) << job.error();
    EXPECT_EQ(fault_of(job)["rank"], 1) << job.error();
    EXPECT_FALSE(fault_of(job).contains("because_of"));
    EXPECT_THAT(job.error(), HasSubstr("last lines of rank 1:\n  | what went wrong\n"));
  }
}

TEST(Failure, ARankThatEndedWellIsNoFailureAndTheOthersSayBecauseOfWhom) {
  for (const std::string how : {"well", "timeout"}) {
    const Folder folder;
    Launched job = Launched::run(
        {"--nproc-per-node", "3", RANK_PROGRAM, "follow", folder.path().string(), how});
    EXPECT_EQ(job.wait(), 1) << job.error();
    EXPECT_THAT(job.error(),
                HasSubstr(how == "well" ? "ended with exit code 1, because of rank 1 (peer "
                                          "lost): rank 1 had ended before, with exit code 0"
                                        : "ended with exit code 1, because of rank 1 (timeout)"));
    EXPECT_EQ(fault_of(job)["because_of"], std::vector<int>{1});
    EXPECT_NE(fault_of(job)["rank"], 1);
  }
}

TEST(Failure, BlameIsFollowedToItsEnd) {
  const auto ended = [](int rank, std::vector<int> blamed) {
    return Failure{.rank = rank, .blame = {std::move(blamed), "peer lost"}};
  };
  EXPECT_EQ(first_of({ended(0, {1}), ended(1, {2}), ended(2, {})}), 2u);
  EXPECT_EQ(first_of({ended(3, {}), ended(0, {1}), ended(1, {})}), 2u) << "that others blame";
  EXPECT_EQ(first_of({ended(0, {1}), ended(3, {0}), ended(1, {2})}), 2u) << "rank 2 is not there";
  EXPECT_EQ(first_of({ended(0, {1}), ended(1, {0})}), 1u) << "a circle has an end";
  EXPECT_EQ(first_of({ended(3, {}), ended(4, {})}), 0u);
}

TEST(Failure, InterruptEndsAll) {
  struct Case {
    int signal;
    int code;
  };
  for (const auto& [signal, code] : {Case{SIGINT, 130}, Case{SIGTERM, 143}, Case{SIGHUP, 129}}) {
    Launched job = Launched::run({"--nproc-per-node", "2", "sh", "-c",
                                  "trap 'echo got INT; exit 9' INT; trap 'echo got TERM; exit 9' "
                                  "TERM; echo ready; while :; do sleep 0.05; done"});
    ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready"));
    job.kill(signal);
    EXPECT_EQ(job.wait(), code) << job.error();
    EXPECT_TRUE(job.all_gone(milliseconds(0)));
    const char* heard = signal == SIGINT ? "[1] got INT" : signal == SIGTERM ? "[1] got TERM" : "";
    EXPECT_THAT(job.output(), HasSubstr(heard));
    EXPECT_EQ(fault_of(job)["kind"], "interrupted");
  }
}

TEST(Failure, InsistingEndsTheDeaf) {
  Launched job = Launched::run(
      {"--grace", "60", "sh", "-c", "trap '' INT TERM; echo ready; while :; do sleep 1; done"});
  ASSERT_TRUE(job.says("[0] ready"));
  for (int i = 0; i < 3; ++i) {
    job.kill(SIGINT);
    job.wait(milliseconds(100));
  }
  EXPECT_EQ(job.wait(), 130);
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

// Each rank has a child in its group, one in a session of its own, and one whose parent is gone.
const char* const kFamily =
    "sleep 100 & setsid sleep 100 & (setsid sh -c 'trap \"\" TERM INT HUP; sleep 100' &) ; echo "
    "ready; ";

TEST(Failure, NothingSurvivesAKilledLauncher) {
  Launched job =
      Launched::run({"--nproc-per-node", "2", "sh", "-c", std::string(kFamily) + "sleep 100"});
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready"));
  EXPECT_GE(job.alive().size(), 1u + 2 * 4);
  job.kill(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
  EXPECT_TRUE(job.all_gone(kSoon));
}

TEST(Failure, NothingSurvivesAKilledGuardian) {
  Launched job =
      Launched::run({"--nproc-per-node", "2", "sh", "-c", std::string(kFamily) + "sleep 100"});
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready"));
  pid_t guardian = 0;
  for (const pid_t pid : job.alive()) {
    std::ifstream name("/proc/" + std::to_string(pid) + "/comm");
    std::string text;
    if (std::getline(name, text) && text == "lockstep-guard") guardian = pid;
  }
  ASSERT_GT(guardian, 0);
  ::kill(guardian, SIGKILL);
  EXPECT_EQ(job.wait(), 1) << job.error();
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
  EXPECT_EQ(fault_of(job)["kind"], "node_lost");
}

TEST(Failure, WhatRanksLeaveBehindEndsWithTheJob) {
  Launched job = Launched::run({"--nproc-per-node", "2", "sh", "-c", kFamily});
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST(Failure, AProgramThatTheKernelRefuses) {
  const Folder folder;
  const std::string plain = folder.write("plain", "neither program nor script\n", 0755);
  Launched job = Launched::run({"--nproc-per-node", "2", plain});
  EXPECT_EQ(job.wait(), 126);
  EXPECT_THAT(job.error(), HasSubstr("could not be started: Exec format error"));
  EXPECT_EQ(fault_of(job)["kind"], "spawn");
  const std::string orphan = folder.write("orphan", "#!/no/such/interpreter\n", 0755);
  Launched other = Launched::run({orphan});
  EXPECT_EQ(other.wait(), 127);
  EXPECT_THAT(other.error(), HasSubstr("interpreter"));
}

TEST(Failure, PrintsWhereRanksWereFromTheirDumps) {
  const Folder folder;
  flight::Recorder recorder("world", 0, {0, 1}, [](const flight::Record& record) {
    return "all_reduce #" + std::to_string(record.sequence);
  });
  recorder.record({.sequence = 7, .operation = "all_reduce", .file = "train.cpp", .line = 42});
  ASSERT_TRUE(flight::write_dump(recorder, folder.path(), {.reason = "a test"}));
  const std::string copy = "cp " + folder.path().string() + "/flight-* $LOCKSTEP_FLIGHT_DIR; ";
  Launched job = Launched::run(
      {"--nproc-per-node", "2", "sh", "-c",
       "if [ $RANK = 1 ]; then until [ -e $LOCKSTEP_FLIGHT_DIR/copied ]; do sleep 0.01; "
       "done; rm $LOCKSTEP_FLIGHT_DIR/copied; exit 4; fi; echo $LOCKSTEP_FLIGHT_DIR; " +
           copy + "touch $LOCKSTEP_FLIGHT_DIR/copied; sleep 30"});
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.error(), HasSubstr("where the ranks of this host were"));
  EXPECT_THAT(job.error(), HasSubstr("group 'world' (2 ranks)"));
  EXPECT_THAT(job.error(), HasSubstr("all_reduce #7"));
  ASSERT_FALSE(job.output().empty());
  const std::string kept = lines_of(job.output()).at(0).substr(4);
  EXPECT_THAT(job.error(), HasSubstr("dumps in " + kept));
  EXPECT_GT(std::filesystem::remove_all(kept), 1u);
}

// Asking where ranks are does no harm, even if they have nothing to report.
TEST(Failure, AskingWhereRanksAreLeavesNothingBehind) {
  const Folder folder;
  const std::string end = folder.path().string() + "/end";
  Launched job = Launched::run(
      {"sh", "-c", "echo $LOCKSTEP_FLIGHT_DIR; while [ ! -e " + end + " ]; do sleep 0.02; done"});
  ASSERT_TRUE(job.says("lockstep-flight-"));
  job.kill(SIGUSR1);
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    return job.error().find("no rank of this host has made a group") != std::string::npos;
  })) << job.error();
  folder.write("end", "");
  EXPECT_EQ(job.wait(), 0) << job.error();
  const std::string flight = lines_of(job.output()).at(0).substr(4);
  EXPECT_FALSE(std::filesystem::exists(flight)) << flight;
  EXPECT_THAT(job.error(), Not(HasSubstr("calls in it have failed")));
}

TEST(Failure, LeavesNoFolderWhereThereAreNoDumps) {
  Launched job = Launched::run({"sh", "-c", "echo $LOCKSTEP_FLIGHT_DIR; exit 1"});
  EXPECT_EQ(job.wait(), 1);
  const std::string folder = lines_of(job.output()).at(0).substr(4);
  EXPECT_FALSE(std::filesystem::exists(folder)) << folder;
  EXPECT_THAT(job.error(), Not(HasSubstr("where the ranks")));
}

// Failed jobs leave dumps for somebody to read, but not forever.
TEST(Failure, OnlyTheNewestDumpsOfFailedJobsStay) {
  namespace fs = std::filesystem;
  const Folder folder;
  const auto age = [](const fs::path& path, int minutes) {
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::minutes(minutes));
  };
  for (int i = 0; i < 8; ++i) {
    const fs::path old = folder.path() / fmt::format("lockstep-flight-{:06}", i);
    fs::create_directory(old);
    std::ofstream(old / "flight-world.rank0.json") << "{}";
    age(old, i == 7 ? 0 : 10 + i);
  }
  // The oldest dump belongs to a job that still runs.
  Launched running = Launched::run({"sh", "-c", "echo $LOCKSTEP_FLIGHT_DIR; sleep 100"},
                                   {"TMPDIR=" + folder.path().string()});
  ASSERT_TRUE(running.says("lockstep-flight-"));
  const fs::path in_use = lines_of(running.output()).at(0).substr(4);
  age(in_use, 60);
  Launched job = Launched::run({"sh", "-c", "touch $LOCKSTEP_FLIGHT_DIR/demand; exit 1"},
                               {"TMPDIR=" + folder.path().string()});
  EXPECT_EQ(job.wait(), 1) << job.error();
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(folder.path()))
    if (entry.path() != in_use) left.push_back(entry.path().filename().string());
  EXPECT_THAT(left,
              ::testing::UnorderedElementsAre("lockstep-flight-000000", "lockstep-flight-000001",
                                              "lockstep-flight-000002", "lockstep-flight-000003",
                                              "lockstep-flight-000007"));
  EXPECT_TRUE(fs::exists(in_use));
}

TEST(Failure, SurvivesEncoding) {
  const Failure failure{.kind = Failure::Kind::signal,
                        .rank = 5,
                        .local_rank = 1,
                        .node_rank = 2,
                        .host = "h",
                        .pid = 7,
                        .exit_code = 137,
                        .signal = 9,
                        .final = true,
                        .blame = {{3, 4}, "aborted"},
                        .detail = "d",
                        .last_lines = {"a\"b", std::string("\xff\x00z", 3)},
                        .output_files = {"/logs/1/stderr.log"}};
  const Failure back = Failure::decode(failure.encode());
  EXPECT_EQ(back.machine_line(), failure.machine_line());
  EXPECT_EQ(back.sentence(), failure.sentence());
  EXPECT_TRUE(back.final);
  EXPECT_THAT(back.sentence(), HasSubstr("because of ranks 3 and 4 (aborted)"));
  EXPECT_EQ(back.output_files, failure.output_files);
  ASSERT_EQ(back.last_lines.size(), 2u);
  EXPECT_EQ(back.last_lines[0], "a\"b");
  EXPECT_EQ(back.encode().find('\n'), std::string::npos);
}

TEST(Failure, SaysWhatABusErrorMayBe) {
  const Failure failure{.kind = Failure::Kind::signal, .signal = SIGBUS};
  EXPECT_THAT(failure.sentence(), HasSubstr("cut short"));
  EXPECT_THAT(failure.sentence(), HasSubstr("/dev/shm"));
}

}  // namespace
}  // namespace lockstep::launch::testing
