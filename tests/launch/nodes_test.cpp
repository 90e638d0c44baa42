// Real jobs on several hosts: each launcher is in a network namespace of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "network.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;

// How long a job may take to end after a failure. The promise is one second on a machine with time
// for it; a busy one gets more, by how long it took to start the same ranks.
milliseconds promised(Clock::time_point start, Clock::time_point all_ready) {
  return milliseconds(10'000) + 10 * std::chrono::duration_cast<milliseconds>(all_ready - start);
}
const char* const kWaiting = "echo ready; while :; do sleep 1; done";

class Nodes : public ::testing::Test {
 protected:
  // Connects `size` hosts; false (and the test is skipped) if that is not permitted.
  bool connect(int size) {
    network_ = std::make_unique<Network>(size);
    secret_ = folder_.write("secret", std::string(32, 's'), 0600);
    size_ = size;
    return network_->works();
  }

  Launched start(int host, std::vector<std::string> arguments) {
    std::vector<std::string> all = {"--nnodes",        std::to_string(size_),
                                    "--rdzv-endpoint", Network::address(0) + ":29400",
                                    "--secret-file",   secret_};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return network_->run(host, std::move(all));
  }

  // Starts two ranks, which wait forever, on each host.
  std::vector<Launched> start_waiting() {
    std::vector<Launched> jobs;
    for (int host = 0; host < size_; ++host)
      jobs.push_back(start(host, {"--node-rank", std::to_string(host), "--nproc-per-node", "2",
                                  "sh", "-c", kWaiting}));
    for (std::size_t host = 0; host < jobs.size(); ++host)
      for (std::size_t local = 0; local < 2; ++local)
        EXPECT_TRUE(jobs[host].says("[" + std::to_string(2 * host + local) + "] ready"))
            << jobs[host].error();
    return jobs;
  }

  void expect_all_end(std::vector<Launched>& jobs, int code, const std::string& reason,
                      const Launched* except = nullptr) {
    for (Launched& job : jobs) {
      if (&job == except) continue;
      EXPECT_EQ(job.wait(), code) << job.error();
      EXPECT_THAT(job.error(), HasSubstr(reason));
      EXPECT_THAT(job.error(), HasSubstr("lockstep: fault {"));
      EXPECT_TRUE(job.all_gone(milliseconds(0)));
    }
  }

  Folder folder_;
  std::string secret_;
  std::unique_ptr<Network> network_;
  int size_ = 0;
};

#define CONNECT_OR_SKIP(size)                                            \
  if (!connect(size))                                                    \
  GTEST_SKIP() << "this process may not make network namespaces (needs " \
                  "root and 'ip')"

TEST_F(Nodes, RanksAreNumberedAcrossHostsOfDifferentSizes) {
  CONNECT_OR_SKIP(3);
  std::vector<Launched> jobs;
  jobs.push_back(start(1, {"--node-rank", "2", "--nproc-per-node", "1", RANK_PROGRAM}));
  jobs.push_back(start(2, {"--node-rank", "1", "--nproc-per-node", "3", RANK_PROGRAM}));
  jobs.push_back(start(0, {"--node-rank", "0", "--nproc-per-node", "2", RANK_PROGRAM}));
  for (Launched& job : jobs) EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_THAT(jobs[2].output(), HasSubstr("[1] launcher=lockstep run rank=1 world=6 local=1/2 "
                                          "node=0/3"));
  EXPECT_THAT(jobs[1].output(), HasSubstr("[4] launcher=lockstep run rank=4 world=6 local=2/3 "
                                          "node=1/3"));
  EXPECT_THAT(jobs[0].output(), HasSubstr("[5] launcher=lockstep run rank=5 world=6 local=0/1 "
                                          "node=2/3"));
}

TEST_F(Nodes, NodeRanksMayBeLeftOut) {
  CONNECT_OR_SKIP(2);
  Launched second =
      start(1, {"sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"});
  Launched first = start(0, {"sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"});
  EXPECT_EQ(first.wait(), 0) << first.error();
  EXPECT_EQ(second.wait(), 0) << second.error();
  EXPECT_THAT(first.output(), HasSubstr("[0] 0 of 2 at 10.77.0.1:"));
  EXPECT_THAT(second.output(), HasSubstr("[1] 1 of 2 at 10.77.0.1:"));
  // Both got the same port, which is not the launchers' own.
  EXPECT_EQ(first.output().substr(first.output().find(" of ")),
            second.output().substr(second.output().find(" of ")));
  EXPECT_EQ(first.output().find(":29400"), std::string::npos);
}

// A host that cannot listen at the endpoint joins, which is normal, so no advice is printed.
TEST_F(Nodes, AHostThatJoinsSaysSoPlainly) {
  CONNECT_OR_SKIP(2);
  for (const int host : {1, 0}) {  // first on the other host, then on the host of the first one
    Launched first = start(0, {"true"});
    ASSERT_TRUE(eventually(milliseconds(60'000), [&] {
      return first.error().find("this is node 0") != std::string::npos;
    })) << first.error();
    Launched second = start(host, {"true"});
    EXPECT_EQ(first.wait(), 0) << first.error();
    EXPECT_EQ(second.wait(), 0) << second.error();
    const std::vector<std::string> said = lines_of(second.error());
    ASSERT_EQ(said.size(), 1u) << second.error();
    EXPECT_TRUE(said[0].ends_with("joining node 0 at 10.77.0.1:29400")) << said[0];
  }
}

// The launcher of host 0 hears first that its own rank has ended, and waits for the rank that was
// lost.
TEST_F(Nodes, TheRankThatAnotherHostLostIsNamedThoughItEndsLast) {
  CONNECT_OR_SKIP(2);
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host)
    jobs.push_back(start(host, {"--node-rank", std::to_string(host), RANK_PROGRAM, "follow",
                                folder_.path().string(), "exit"}));
  expect_all_end(jobs, 7, "the job failed: rank 1 (local rank 0");
}

// Ctrl-Z on one host: the launchers of the others go on running and wait for it.
TEST_F(Nodes, RanksOfAllHostsStandStillTogether) {
  CONNECT_OR_SKIP(2);
  const std::string end = (folder_.path() / "end").string();
  std::vector<Launched> jobs;
  // The ranks have no children, for the reason in Watch.AllStandStillWithTheLauncherAndGoOnWithIt.
  for (int host = 0; host < 2; ++host)
    jobs.push_back(start(host, {"--node-rank", std::to_string(host), "sh", "-c",
                                "echo runs; until [ -e " + end + " ]; do :; done"}));
  ASSERT_TRUE(jobs[0].says("[0] runs") && jobs[1].says("[1] runs"));
  const auto told = [&](const Launched& job, const char* text, int times) {
    return eventually(milliseconds(60'000), [&] { return count_of(text, job.error()) == times; });
  };
  for (std::size_t host = 0; host < 2; ++host) {
    const int times = static_cast<int>(host) + 1;
    jobs[host].kill(SIGTSTP);
    EXPECT_TRUE(jobs[host].stopped());
    EXPECT_TRUE(told(jobs[1 - host], "the job stands still", times)) << jobs[1 - host].error();
    jobs[host].kill(SIGCONT);
    for (const Launched& job : jobs) EXPECT_TRUE(told(job, "the job goes on", times));
  }
  folder_.write("end", "");
  for (Launched& job : jobs) EXPECT_EQ(job.wait(), 0) << job.error();
}

TEST_F(Nodes, AFailedRankEndsAllHosts) {
  CONNECT_OR_SKIP(3);
  std::vector<Launched> jobs;
  const auto start_time = Clock::now();
  const std::string go = (folder_.path() / "go").string();
  for (int host = 0; host < 3; ++host)
    jobs.push_back(
        start(host, {"--node-rank", std::to_string(host), "--nproc-per-node", "2", "sh", "-c",
                     "trap '' TERM; echo ready; while :; do sleep 0.05; if [ $RANK = 3 ] && [ "
                     "-e " +
                         go + " ]; then echo farewell; exit 7; fi; done"}));
  for (Launched& job : jobs) ASSERT_TRUE(job.says("ready")) << job.error();
  const auto begin = Clock::now();
  folder_.write("go", "");
  expect_all_end(jobs, 7, "rank 3 (local rank 1 on host host1");
  EXPECT_LT(Clock::now() - begin, promised(start_time, begin));
  for (const Launched& job : jobs) {
    EXPECT_THAT(job.error(), HasSubstr("  | farewell\n"));
    EXPECT_THAT(
        job.error(),
        HasSubstr(R"({"kind":"exit","rank":3,"local_rank":1,"node_rank":1,"host":"host1")"));
  }
}

TEST_F(Nodes, AKilledLauncherEndsAllHosts) {
  CONNECT_OR_SKIP(3);
  for (const std::size_t victim : {2u, 0u}) {
    const auto start_time = Clock::now();
    std::vector<Launched> jobs = start_waiting();
    const auto begin = Clock::now();
    jobs[victim].kill(SIGKILL);
    EXPECT_TRUE(jobs[victim].all_gone(promised(start_time, begin)));
    expect_all_end(jobs, 1,
                   "the launcher of node " + std::to_string(victim) + " (host host" +
                       std::to_string(victim) + ") is gone",
                   &jobs[victim]);
    EXPECT_LT(Clock::now() - begin, promised(start_time, begin));
    EXPECT_EQ(jobs[victim].wait(), 128 + SIGKILL);
  }
}

TEST_F(Nodes, AnInterruptOnOneHostEndsAll) {
  CONNECT_OR_SKIP(2);
  std::vector<Launched> jobs = start_waiting();
  jobs[1].kill(SIGINT);
  expect_all_end(jobs, 130, "node 1 (host host1) was told to end by SIGINT");
}

TEST_F(Nodes, ACutLinkIsNoticed) {
  CONNECT_OR_SKIP(2);
  std::vector<Launched> jobs = start_waiting();
  network_->set_link(1, "down");
  // Each launcher sees the other one vanish.
  EXPECT_EQ(jobs[0].wait(milliseconds(60'000)), 1);
  EXPECT_THAT(jobs[0].error(), HasSubstr("the launcher of node 1 (host host1) is gone: no word"));
  EXPECT_EQ(jobs[1].wait(milliseconds(60'000)), 1);
  EXPECT_THAT(jobs[1].error(), HasSubstr("the launcher of node 0 (host host0) is gone: no word"));
}

TEST_F(Nodes, MissingOnesAreNamedAtTheDeadline) {
  CONNECT_OR_SKIP(4);
  Launched first = start(0, {"--node-rank", "0", "--timeout", "1.5", "true"});
  Launched third = start(2, {"--node-rank", "2", "--timeout", "1.5", "true"});
  Launched lost = network_->run(
      1, {"--nnodes", "4", "--node-rank", "1", "--rdzv-endpoint", Network::address(3) + ":29400",
          "--secret-file", secret_, "--timeout", "1.5", "true"});
  EXPECT_EQ(first.wait(), 1);
  EXPECT_THAT(first.error(), HasSubstr("node ranks 1 and 3 of 4 did not come within 1.5 s"));
  EXPECT_EQ(third.wait(), 1);
  EXPECT_THAT(third.error(), HasSubstr("node ranks 1 and 3 of 4 did not come within 1.5 s"));
  EXPECT_EQ(lost.wait(), 1);
  EXPECT_THAT(lost.error(), HasSubstr("Node 0 did not answer at 10.77.0.4:29400 within 1.5 s"));
}

TEST_F(Nodes, AWrongSecretIsRefusedAndHarmsNobody) {
  CONNECT_OR_SKIP(2);
  const std::string wrong = folder_.write("wrong", std::string(32, 'w'), 0600);
  Launched first = start(0, {"--node-rank", "0", "echo", "fine"});
  Launched stranger = start(1, {"--node-rank", "1", "--secret-file", wrong, "echo", "never"});
  EXPECT_EQ(stranger.wait(), 1);
  EXPECT_THAT(stranger.error(), HasSubstr("does not know this job's secret"));
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    return first.error().find("a launcher at 10.77.0.2 did not prove that it knows this job's "
                              "secret") != std::string::npos;
  })) << first.error();
  EXPECT_THAT(stranger.error(), HasSubstr("--secret-file"));
  EXPECT_EQ(stranger.output(), "");
  Launched second = start(1, {"--node-rank", "1", "echo", "fine"});
  EXPECT_EQ(first.wait(), 0) << first.error();
  EXPECT_EQ(second.wait(), 0) << second.error();
}

TEST_F(Nodes, ContradictionsAreNamed) {
  CONNECT_OR_SKIP(3);
  Launched first = start(0, {"--node-rank", "0", "echo", "fine"});
  Launched other =
      network_->run(1, {"--nnodes", "2", "--rdzv-endpoint", Network::address(0) + ":29400",
                        "--secret-file", secret_, "--node-rank", "1", "true"});
  EXPECT_EQ(other.wait(), 1);
  EXPECT_THAT(other.error(),
              HasSubstr("has --nnodes 3, but host host1 was started with --nnodes 2"));
  Launched second = start(1, {"--node-rank", "1", "echo", "fine"});
  while (second.alive().empty()) std::this_thread::yield();
  Launched twin = start(2, {"--node-rank", "1", "echo", "fine"});
  // The one that came first stays.
  Launched* refused = nullptr;
  while (refused == nullptr) {
    if (second.wait(milliseconds(50)) == 1) refused = &second;
    if (twin.wait(milliseconds(50)) == 1) refused = &twin;
  }
  EXPECT_THAT(refused->error(), HasSubstr("were both started with --node-rank 1"));
  Launched third = start(2, {"--node-rank", "2", "echo", "fine"});
  EXPECT_EQ(first.wait(), 0) << first.error();
  EXPECT_EQ(third.wait(), 0) << third.error();
}

}  // namespace
}  // namespace lockstep::launch::testing
