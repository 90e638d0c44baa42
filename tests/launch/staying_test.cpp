// Ranks that stay when another rank is lost, and processes that stand by to take its place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "elastic_nodes.h"
#include "ended_for_good.h"
#include "launched.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// By rank, the process that had it in that generation, read from the output.
std::map<int, pid_t> pids_in(const std::string& output, int generation) {
  std::map<int, pid_t> pids;
  for (const std::string& line : lines_of(output)) {
    int pid = 0, rank = 0, world = 0, in = 0;
    const auto start = line.find("pid=");
    if (start == std::string::npos) continue;
    if (std::sscanf(line.c_str() + start, "pid=%d rank=%d world=%d generation=%d", &pid, &rank,
                    &world, &in) == 4 &&
        in == generation)
      pids[rank] = pid;
  }
  return pids;
}

// The CPU time that the process itself has used so far.
milliseconds cpu_time_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  long user = 0, system = 0;
  const auto name_end = text.rfind(')');
  if (name_end == std::string::npos ||
      std::sscanf(text.c_str() + name_end, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %ld %ld",
                  &user, &system) != 2) {
    ADD_FAILURE() << "no such process: " << pid;
    return {};
  }
  return milliseconds((user + system) * 1000 / ::sysconf(_SC_CLK_TCK));
}

bool appears(const std::string& file, const Folder& folder) {
  return eventually(milliseconds(60'000),
                    [&] { return std::filesystem::exists(folder.path() / file); });
}

class Staying : public ::testing::Test {
 protected:
  Launched start(std::vector<std::string> arguments, const std::string& word = "") {
    arguments.insert(arguments.end(), {STAYING_PROGRAM, (folder_.path() / "go").string()});
    if (!word.empty()) arguments.push_back(word);
    return Launched::run(std::move(arguments));
  }
  void finish() const { folder_.write("go", ""); }

  static std::map<int, pid_t> wait_for(const Launched& job, int generation, std::size_t num_ranks) {
    EXPECT_TRUE(eventually(milliseconds(60'000),
                           [&] { return pids_in(job.output(), generation).size() == num_ranks; }))
        << job.output() << job.error();
    return pids_in(job.output(), generation);
  }

  // Waits until this many processes have been ranks or spares, and have told the launcher that they
  // stay.
  static bool have_stayed(const Launched& job, std::size_t num_processes) {
    return eventually(milliseconds(60'000), [&] {
      const std::string output = job.output();
      std::size_t found = 0;
      for (const std::string& line : lines_of(output)) found += line.ends_with(" stays") ? 1 : 0;
      return found == num_processes;
    });
  }

  // Waits until the launcher, the guardian and the launcher's processes are that many.
  static bool comes_to(const Launched& job, std::size_t num_processes) {
    return eventually(milliseconds(60'000), [&] { return job.alive().size() == num_processes; });
  }

  Folder folder_;
};

TEST_F(Staying, SurvivorsKeepTheirProcesses) {
  Launched job = start({"--nproc-per-node", "3", "--max-restarts", "2"});
  const auto before = wait_for(job, 0, 3);
  ::kill(before.at(1), SIGKILL);
  const auto after = wait_for(job, 1, 3);
  EXPECT_EQ(after.at(0), before.at(0));
  EXPECT_NE(after.at(1), before.at(1));
  EXPECT_EQ(after.at(2), before.at(2));
  // Another rank is lost: the rank that was started anew stays, too.
  ::kill(after.at(0), SIGKILL);
  const auto last = wait_for(job, 2, 3);
  EXPECT_NE(last.at(0), after.at(0));
  EXPECT_EQ(last.at(1), after.at(1));
  EXPECT_EQ(last.at(2), after.at(2));
  finish();
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_THAT(job.error(), HasSubstr("; 2 stayed on this host"));
  EXPECT_THAT(job.error(), Not(HasSubstr("ending the others")));
  const auto faults = faults_in(job.error());
  ASSERT_THAT(faults, SizeIs(2)) << job.error();
  EXPECT_EQ(nlohmann::json::parse(faults[0])["rank"], 1);
  EXPECT_EQ(nlohmann::json::parse(faults[1])["rank"], 0);
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST_F(Staying, ASpareTakesThePlaceOfALostRank) {
  for (const int num_ranks : {1, 2}) {
    Launched job = start(
        {"--nproc-per-node", std::to_string(num_ranks), "--max-restarts", "2", "--spares", "1"});
    const auto before = wait_for(job, 0, static_cast<std::size_t>(num_ranks));
    ASSERT_TRUE(have_stayed(job, static_cast<std::size_t>(num_ranks) + 1)) << job.error();
    const std::vector<pid_t> alive = job.alive();
    ::kill(before.at(0), SIGKILL);
    const auto after = wait_for(job, 1, static_cast<std::size_t>(num_ranks));
    EXPECT_NE(after.at(0), before.at(0));
    EXPECT_THAT(alive, ::testing::Contains(after.at(0))) << "it was started after the loss";
    EXPECT_THAT(job.error(), HasSubstr("; 1 spare steps in\n"));
    // By then another process stands by.
    EXPECT_TRUE(have_stayed(job, static_cast<std::size_t>(num_ranks) + 2)) << job.error();
    EXPECT_TRUE(comes_to(job, static_cast<std::size_t>(num_ranks) + 3)) << job.error();
    finish();
    EXPECT_EQ(job.wait(), 0) << job.error();
    EXPECT_TRUE(job.all_gone(milliseconds(0)));
    std::filesystem::remove(folder_.path() / "go");
  }
}

TEST_F(Staying, ARankThatIsLostAfterAnotherIsNamedToo) {
  Launched job = start({"--nproc-per-node", "3", "--max-restarts", "1"}, "deaf");
  const auto before = wait_for(job, 0, 3);
  ::kill(before.at(2), SIGKILL);
  ASSERT_TRUE(job.says("[1] told to leave")) << job.error();
  ::kill(before.at(0), SIGKILL);  // it has not left
  const auto after = wait_for(job, 1, 3);
  EXPECT_EQ(after.at(1), before.at(1));
  finish();
  EXPECT_EQ(job.wait(), 0) << job.error();
  const auto faults = faults_in(job.error());
  ASSERT_THAT(faults, SizeIs(2)) << job.error();
  std::vector<int> ranks;
  for (const std::string& fault : faults) ranks.push_back(nlohmann::json::parse(fault)["rank"]);
  EXPECT_THAT(ranks, ::testing::UnorderedElementsAre(0, 2));
}

// It did not hear what it was told last, but its own last message counts all the same.
TEST_F(Staying, ARankThatFailsForGoodAfterAnotherWasLostEndsTheJob) {
  Launched job = start({"--nproc-per-node", "3", "--max-restarts", "2"}, "fails_for_good");
  ::kill(wait_for(job, 0, 3).at(2), SIGKILL);
  EXPECT_EQ(job.wait(), 9) << job.error();
  expect_ended_for_good(job, 0);
}

TEST_F(Staying, WhoDoesNotLeaveIsStartedAnew) {
  Launched job =
      start({"--nproc-per-node", "3", "--max-restarts", "1", "--leave-within", "0.3"}, "deaf");
  const auto before = wait_for(job, 0, 3);
  ::kill(before.at(2), SIGKILL);
  const auto after = wait_for(job, 1, 3);
  EXPECT_NE(after.at(0), before.at(0));
  EXPECT_EQ(after.at(1), before.at(1));
  EXPECT_THAT(job.error(), HasSubstr("rank 0 (pid " + std::to_string(before.at(0)) +
                                     ") did not leave the generation within 0.3 s: it is started "
                                     "anew\n"));
  finish();
  EXPECT_EQ(job.wait(), 0) << job.error();
}

TEST_F(Staying, ARankThatHangsUpCostsTheLauncherNothing) {
  Launched job = start({"--max-restarts", "1"}, "hangs_up");
  ASSERT_TRUE(appears("hung_up", folder_)) << job.error();
  const auto before = cpu_time_of(job.pid());
  EXPECT_EQ(job.wait(milliseconds(2000)), -1);  // only time may pass
  EXPECT_LT(cpu_time_of(job.pid()) - before, milliseconds(500));
  finish();
  EXPECT_EQ(job.wait(), 0) << job.error();
}

TEST_F(Staying, ARankThatHasHungUpIsStartedAnew) {
  Launched job = start({"--nproc-per-node", "3", "--max-restarts", "1"}, "hangs_up");
  const auto before = wait_for(job, 0, 3);
  ASSERT_TRUE(appears("hung_up", folder_)) << job.error();
  ::kill(before.at(2), SIGKILL);
  const auto after = wait_for(job, 1, 3);
  EXPECT_NE(after.at(0), before.at(0)) << "nobody could tell it that there is another generation";
  EXPECT_EQ(after.at(1), before.at(1));
  EXPECT_NE(after.at(2), before.at(2));
  EXPECT_NE(::kill(before.at(0), 0), 0) << "it is still there";
  finish();
  EXPECT_EQ(job.wait(), 0) << job.error();
}

TEST_F(Staying, AStoppedRankIsReplacedAndCannotComeBack) {
  // It cannot act on a polite signal, so nobody waits for that.
  Launched job = start({"--nproc-per-node", "2", "--max-restarts", "1", "--grace", "60"});
  const auto before = wait_for(job, 0, 2);
  ::kill(before.at(1), SIGSTOP);
  const auto after = wait_for(job, 1, 2);
  EXPECT_EQ(after.at(0), before.at(0));
  EXPECT_NE(after.at(1), before.at(1));
  EXPECT_NE(::kill(before.at(1), SIGCONT), 0) << "it is still there";
  EXPECT_THAT(job.error(), HasSubstr("is stopped, by SIGSTOP or a terminal\n"));
  EXPECT_THAT(job.error(), Not(HasSubstr("ending the others")));
  finish();
  EXPECT_EQ(job.wait(), 0) << job.error();
}

TEST_F(Staying, AllEndWithTheJob) {
  {
    Launched job = start({"--nproc-per-node", "3", "--max-restarts", "1", "--spares", "1"});
    ::kill(wait_for(job, 0, 3).at(1), SIGKILL);
    ::kill(wait_for(job, 1, 3).at(2), SIGKILL);
    EXPECT_EQ(job.wait(), 137) << job.error();
    EXPECT_TRUE(job.all_gone(milliseconds(0)));
  }
  Launched job = start({"--nproc-per-node", "2", "--max-restarts", "3", "--spares", "1"});
  wait_for(job, 0, 2);
  ASSERT_TRUE(comes_to(job, 5)) << job.error();
  job.kill(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.error();
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST_F(Staying, SparesThatEndAtOnceAreNotStartedForEver) {
  Launched job = Launched::run({"--max-restarts", "1", "--spares", "1", "sh", "-c",
                                "[ -n \"$LOCKSTEP_SPARE\" ] && exit 1; exec sleep 15"});
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    return job.error().find("spares end as soon as they are started") != std::string::npos;
  })) << job.error();
  job.kill(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
}

TEST_F(Staying, SparesThatAreKilledAreReplacedHoweverMany) {
  Launched job = start({"--max-restarts", "1", "--spares", "3"});
  const pid_t rank = wait_for(job, 0, 1).at(0);
  std::vector<pid_t> killed;
  for (std::size_t spares = 3; spares <= 9; spares += 3) {
    ASSERT_TRUE(have_stayed(job, 1 + spares)) << job.output() << job.error();
    for (const std::string& line : lines_of(job.output())) {
      int pid = 0;
      if (std::sscanf(line.c_str(), "[spare] pid=%d stays", &pid) != 1) continue;
      if (std::count(killed.begin(), killed.end(), pid) > 0) continue;
      ::kill(pid, SIGKILL);
      killed.push_back(pid);
    }
  }
  EXPECT_THAT(killed, SizeIs(9));
  EXPECT_THAT(job.error(), Not(HasSubstr("spares"))) << "they were lost after they had come up";
  finish();
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_EQ(pids_in(job.output(), 0).at(0), rank);
}

TEST_F(Staying, SparesThatCannotBeStartedAreToldOf) {
  const std::string program = folder_.write("program", "#!/bin/sh\nrm $0; exec sleep 30\n", 0755);
  Launched job = Launched::run({"--max-restarts", "1", "--spares", "1", program});
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    return job.error().find("spares cannot be started: No such file") != std::string::npos;
  })) << job.error();
  EXPECT_EQ(count_of("spares", job.error()), 1);
  job.kill(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
}

TEST_F(Staying, WhatALostRankHadStartedIsEndedAndWhatOthersHaveIsNot) {
  const std::string children = (folder_.path() / "children").string();
  Launched job = Launched::run({"--nproc-per-node", "2", "--max-restarts", "1", "sh", "-c",
                                "sleep 1000 & echo $RANK $! >> " + children + "; exec " +
                                    STAYING_PROGRAM + " " + (folder_.path() / "go").string()});
  const auto before = wait_for(job, 0, 2);
  std::map<int, pid_t> of_rank;
  std::ifstream text(children);
  for (int rank = 0, pid = 0; text >> rank >> pid;) of_rank[rank] = pid;
  ASSERT_THAT(of_rank, SizeIs(2));
  ::kill(before.at(1), SIGKILL);
  wait_for(job, 1, 2);
  EXPECT_EQ(::kill(of_rank[0], 0), 0);
  EXPECT_NE(::kill(of_rank[1], 0), 0);
  finish();
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

class StayingNodes : public ElasticNodes {
 protected:
  Launched start_on(int host, std::vector<std::string> arguments = {},
                    const std::string& word = "") {
    arguments.insert(arguments.end(), {"--nproc-per-node", "2", STAYING_PROGRAM, go()});
    if (!word.empty()) arguments.push_back(word);
    return start(host, std::move(arguments));
  }
  static std::map<int, pid_t> wait_for(const Launched& job, int generation) {
    EXPECT_TRUE(eventually(milliseconds(60'000),
                           [&] { return pids_in(job.output(), generation).size() == 2; }))
        << job.output() << job.error();
    return pids_in(job.output(), generation);
  }
};

TEST_F(StayingNodes, ARankLostOnOneHostLeavesTheProcessesOfAll) {
  JOIN_OR_SKIP(2, "2");
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host) jobs.push_back(start_on(host));
  const auto first = wait_for(jobs[0], 0);
  const auto second = wait_for(jobs[1], 0);
  // The host that came first has the lower ranks.
  const bool in_order = first.contains(0);
  const auto& lower = in_order ? first : second;
  ::kill(lower.at(1), SIGKILL);
  const auto first_after = wait_for(jobs[0], 1);
  const auto second_after = wait_for(jobs[1], 1);
  const auto& lower_after = in_order ? first_after : second_after;
  EXPECT_EQ(lower_after.at(0), lower.at(0));
  EXPECT_NE(lower_after.at(1), lower.at(1));
  EXPECT_EQ(in_order ? second_after : first_after, in_order ? second : first);
  finish();
  for (Launched& job : jobs) EXPECT_EQ(job.wait(), 0) << job.error();
}

TEST_F(StayingNodes, ARankThatIsLostWhileTheJobGrowsIsNamed) {
  JOIN_OR_SKIP(2, "1:2");
  Launched first = start_on(0, {"--rdzv-last-call", "0"}, "deaf");
  const auto before = wait_for(first, 0);
  Launched second = start_on(1);
  ASSERT_TRUE(first.says("[1] told to leave soon")) << first.error();
  ::kill(before.at(0), SIGKILL);  // it has not left
  const auto after = wait_for(first, 1);
  wait_for(second, 1);
  EXPECT_NE(after.at(0), before.at(0));
  EXPECT_EQ(after.at(1), before.at(1));
  finish();
  EXPECT_EQ(first.wait(), 0) << first.error();
  EXPECT_EQ(second.wait(), 0) << second.error();
  const auto faults = faults_in(first.error());
  ASSERT_THAT(faults, SizeIs(1)) << first.error();
  const auto fault = nlohmann::json::parse(faults[0]);
  EXPECT_EQ(fault["kind"], "signal");
  EXPECT_EQ(fault["rank"], 0);
  EXPECT_EQ(fault["exit_code"], 128 + SIGKILL);
  EXPECT_EQ(fault["generation"], 0);
  EXPECT_EQ(fault["restarted"], true);
  EXPECT_THAT(first.error(), HasSubstr("0 of 5 restarts used"));
}

TEST_F(StayingNodes, AStepThatIsCompletedWhenANodeComesHasItsStore) {
  JOIN_OR_SKIP(2, "1:2");
  // A busy machine gets more than two seconds for this.
  Launched first = start_on(0, {"--rdzv-last-call", "0", "--grace", "20"}, "completes");
  const auto before = wait_for(first, 0);
  Launched second = start_on(1);
  const auto after = wait_for(first, 1);
  wait_for(second, 1);
  EXPECT_EQ(after, before);
  EXPECT_EQ(count_of("completed a step\n", first.output()), 2) << first.output();
  finish();
  EXPECT_EQ(first.wait(), 0) << first.error();
  EXPECT_EQ(second.wait(), 0) << second.error();
  EXPECT_THAT(faults_in(first.error()), SizeIs(0)) << first.error();
}

// While its ranks wait for the next generation, one hangs up on the launcher and one is killed.
TEST_F(StayingNodes, ARankThatCannotBeToldItsPlaceIsStartedAnew) {
  JOIN_OR_SKIP(2, "2");
  Launched first = start_on(0, {"--node-rank", "0"}, "hangs_up_later");
  Launched second = start_on(1, {"--node-rank", "1"});
  const auto before = wait_for(first, 0);
  wait_for(second, 0);
  second.kill(SIGKILL);
  ASSERT_TRUE(eventually(milliseconds(60'000), [&] {
    return first.error().find("needs 2 nodes and 1 is left") != std::string::npos;
  })) << first.error();
  folder_.write("hang_up", "");
  ASSERT_TRUE(appears("hung_up", folder_)) << first.error();
  ::kill(before.at(1), SIGKILL);
  Launched back = start_on(1, {"--node-rank", "1"});
  const auto after = wait_for(first, 1);
  wait_for(back, 1);
  EXPECT_NE(after.at(0), before.at(0));
  EXPECT_NE(after.at(1), before.at(1));
  for (const auto& [rank, pid] : before) EXPECT_NE(::kill(pid, 0), 0) << "it is still there";
  finish();
  EXPECT_EQ(first.wait(), 0) << first.error();
  EXPECT_EQ(back.wait(), 0) << back.error();
  EXPECT_THAT(first.error(), HasSubstr("it could not be told that it is part of generation 1"));
  // One is for the lost host, and one for each of the two ranks.
  EXPECT_THAT(faults_in(first.error()), SizeIs(3)) << first.error();
  EXPECT_THAT(first.error(), HasSubstr("4 ranks on 2 nodes, 1 of 5 restarts used\n"));
  EXPECT_THAT(first.error(), Not(HasSubstr("2 of 5 restarts used")));
}

TEST_F(StayingNodes, ANodeThatIsLostOrComesLeavesTheProcessesOfTheOthers) {
  JOIN_OR_SKIP(3, "2:3");
  std::vector<Launched> jobs;
  for (int host = 0; host < 3; ++host) jobs.push_back(start_on(host));
  const auto before = wait_for(jobs[0], 0);
  for (const Launched& job : jobs) wait_for(job, 0);
  jobs[2].kill(SIGKILL);
  const auto without = wait_for(jobs[0], 1);
  Launched back = start_on(2);
  const auto with = wait_for(jobs[0], 2);
  wait_for(back, 2);
  // The processes are the same, whatever their ranks.
  for (const auto& later : {without, with})
    for (const auto& [rank, pid] : later)
      EXPECT_TRUE(std::any_of(before.begin(), before.end(),
                              [pid = pid](const auto& one) { return one.second == pid; }));
  EXPECT_THAT(jobs[0].output(), HasSubstr("told to leave soon"));
  finish();
  for (const std::size_t host : {0u, 1u}) EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
  EXPECT_EQ(back.wait(), 0) << back.error();
}

}  // namespace
}  // namespace lockstep::launch::testing
