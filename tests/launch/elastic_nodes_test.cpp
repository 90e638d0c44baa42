// Hosts fail, leave and join while a job runs; each launcher is in a network namespace of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>

#include "elastic_nodes.h"
#include "ended_for_good.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

TEST_F(ElasticNodes, AFailedRankStartsTheRanksOfAllHostsAnew) {
  JOIN_OR_SKIP(2, "2");
  const std::string program = std::string("if [ $LOCKSTEP_GENERATION = 0 ]; then [ $RANK = 3 ] && "
                                          "exit 5; echo first; exec sleep 30; fi; exec ") +
                              RANK_PROGRAM;
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host)
    jobs.push_back(start(host, {"--nproc-per-node", "2", "sh", "-c", program}));
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(), 0) << job.error();
    EXPECT_THAT(job.output(), HasSubstr("world=4 "));
    EXPECT_THAT(job.output(), HasSubstr("generation=1 restarts=1"));
    const auto faults = faults_in(job.error());
    ASSERT_THAT(faults, SizeIs(1)) << job.error();
    const auto fault = nlohmann::json::parse(faults[0]);
    EXPECT_EQ(fault["rank"], 3);
    EXPECT_EQ(fault["exit_code"], 5);
    EXPECT_EQ(fault["restarted"], true);
    EXPECT_TRUE(job.all_gone(milliseconds(0)));
  }
}

TEST_F(ElasticNodes, ARankOnAnyHostCanSayThatARestartCannotHelp) {
  JOIN_OR_SKIP(2, "2");
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host)
    jobs.push_back(start(host, {"--node-rank", std::to_string(host), RANK_PROGRAM, "final"}));
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(), 9) << job.error();
    EXPECT_THAT(faults_in(job.error()), SizeIs(1)) << job.error();
    expect_ended_for_good(job, 1);
  }
}

void expect_all_end_as_it_said(int rank, std::vector<Launched>& jobs) {
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(), 9) << job.error();
    for (const std::string& text : faults_in(job.error())) {
      const auto fault = nlohmann::json::parse(text);
      EXPECT_EQ(fault["restarted"], fault["rank"] != rank) << job.error();
    }
    expect_ended_for_good(job, rank);
  }
}

// Rank 0 aborts when the last rank, on another host, has said that a restart would not help. The
// last rank ends when the file exists.
std::string abort_after_the_word(const std::string& file) {
  return "ulimit -c 0; [ $RANK = 0 ] || exec " + std::string(RANK_PROGRAM) + " final " + file +
         "; until [ -e " + file + ".said ]; do sleep 0.01; done; kill -ABRT $$";
}

TEST_F(ElasticNodes, WhatARankSaysOfARestartCountsMoreThanOneThatAborts) {
  JOIN_OR_SKIP(2, "2");
  finish();
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host)
    jobs.push_back(start(host, {"--node-rank", std::to_string(host), "--nproc-per-node", "2",
                                "--grace", "60", "sh", "-c", abort_after_the_word(go())}));
  expect_all_end_as_it_said(3, jobs);
}

TEST_F(ElasticNodes, WhatARankSaysOfARestartCountsMoreThanOneThatAbortedBefore) {
  JOIN_OR_SKIP(2, "2");
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host)
    jobs.push_back(start(host, {"--node-rank", std::to_string(host), "--grace", "60", "sh", "-c",
                                abort_after_the_word(go())}));
  // Both hosts know of the failure, and what is to happen to the job.
  for (const Launched& job : jobs)
    ASSERT_TRUE(eventually(milliseconds(60'000), [&] {
      return job.error().find("rank 0 (") != std::string::npos;
    })) << job.error();
  jobs[0].kill(SIGSTOP);  // node 0 answers late
  finish();
  EXPECT_EQ(jobs[1].wait(milliseconds(700)), -1);
  jobs[0].kill(SIGCONT);
  expect_all_end_as_it_said(1, jobs);
}

TEST_F(ElasticNodes, StartsWithFewerAfterTheLastCall) {
  JOIN_OR_SKIP(2, "2:4");
  std::vector<Launched> jobs;
  finish();
  for (int host = 0; host < 2; ++host)
    jobs.push_back(start_staying(host, {"--rdzv-last-call", "2"}));
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(), 0) << job.error();
    expect_formed(job, 0, 2);
  }
}

TEST_F(ElasticNodes, GoesOnWithoutANodeWhoseLauncherIsKilled) {
  JOIN_OR_SKIP(3, "2:3");
  std::vector<Launched> jobs;
  for (int host = 0; host < 3; ++host) jobs.push_back(start_staying(host));
  for (const Launched& job : jobs) expect_formed(job, 0, 3);
  jobs[2].kill(SIGKILL);
  EXPECT_TRUE(jobs[2].all_gone(milliseconds(60'000)));
  for (const int host : {0, 1}) expect_formed(jobs[static_cast<std::size_t>(host)], 1, 2);
  finish();
  for (const std::size_t host : {0u, 1u}) {
    EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
    const auto faults = faults_in(jobs[host].error());
    ASSERT_THAT(faults, SizeIs(1)) << jobs[host].error();
    const auto fault = nlohmann::json::parse(faults[0]);
    EXPECT_EQ(fault["kind"], "node_lost");
    EXPECT_EQ(fault["host"], "host2");
    EXPECT_EQ(fault["restarted"], true);
  }
}

TEST_F(ElasticNodes, GoesOnWithoutANodeThatIsCutOff) {
  JOIN_OR_SKIP(3, "2:3");
  std::vector<Launched> jobs;
  for (int host = 0; host < 3; ++host) jobs.push_back(start_staying(host));
  for (const Launched& job : jobs) expect_formed(job, 0, 3);
  network_->set_link(2, "down");
  for (const int host : {0, 1}) expect_formed(jobs[static_cast<std::size_t>(host)], 1, 2);
  // It hears nobody either, and must not go on.
  EXPECT_EQ(jobs[2].wait(), 1) << jobs[2].error();
  EXPECT_EQ(count_of("launcher=", jobs[2].output()), 2);
  EXPECT_TRUE(jobs[2].all_gone(milliseconds(0)));
  finish();
  for (const std::size_t host : {0u, 1u}) EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
}

TEST_F(ElasticNodes, AShortFlapCostsNothing) {
  JOIN_OR_SKIP(2, "2");
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host) jobs.push_back(start_staying(host));
  for (const Launched& job : jobs) expect_formed(job, 0, 2);
  network_->set_link(1, "down");
  EXPECT_EQ(jobs[0].wait(milliseconds(2500)), -1);  // only time may pass
  network_->set_link(1, "up");
  EXPECT_EQ(jobs[0].wait(milliseconds(3000)), -1);
  finish();
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(), 0) << job.error();
    EXPECT_THAT(faults_in(job.error()), SizeIs(0));
  }
}

TEST_F(ElasticNodes, NodesLeaveAndCome) {
  JOIN_OR_SKIP(5, "3:5");
  std::vector<Launched> jobs;
  for (int host = 0; host < 4; ++host)
    jobs.push_back(start_staying(host, {"--rdzv-conf", "last_call_timeout=3"}));
  for (const Launched& job : jobs) expect_formed(job, 0, 4);
  jobs[1].kill(SIGKILL);
  for (const std::size_t host : {0u, 2u, 3u}) expect_formed(jobs[host], 1, 3);
  // The host that left comes back, and another one joins with it.
  Launched back = start_staying(1);
  Launched fresh = start_staying(4);
  expect_formed(back, 5);
  expect_formed(fresh, 5);
  for (const std::size_t host : {0u, 2u, 3u}) expect_formed(jobs[host], 5);
  finish();
  EXPECT_EQ(back.wait(), 0) << back.error();
  EXPECT_EQ(fresh.wait(), 0) << fresh.error();
  for (const std::size_t host : {0u, 2u, 3u}) {
    EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
    // Joining used up no restart.
    EXPECT_THAT(jobs[host].error(), HasSubstr("10 ranks on 5 nodes, 1 of 5 restarts used"));
    EXPECT_THAT(faults_in(jobs[host].error()), SizeIs(1));
  }
  EXPECT_THAT(jobs[0].error(), HasSubstr("came to the 3 nodes of this job"));
}

TEST_F(ElasticNodes, AFixedNumberWaitsForTheOneThatComesBack) {
  JOIN_OR_SKIP(3, "3");
  std::vector<Launched> jobs;
  for (int host = 0; host < 3; ++host)
    jobs.push_back(start_staying(host, {"--node-rank", std::to_string(host)}));
  for (const Launched& job : jobs) expect_formed(job, 0, 3);
  jobs[1].kill(SIGKILL);
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    return jobs[2].error().find("needs 3 nodes and 2 are left; waiting") != std::string::npos;
  })) << jobs[2].error();
  Launched back = start_staying(1, {"--node-rank", "1"});
  expect_formed(back, 1, 3);
  EXPECT_THAT(back.output(), HasSubstr("/2 node=1/3 "));
  finish();
  EXPECT_EQ(back.wait(), 0) << back.error();
  for (const std::size_t host : {0u, 2u}) EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
}

TEST_F(ElasticNodes, OneTooManyWaitsAndTakesTheLostOnesPlace) {
  JOIN_OR_SKIP(3, "2");
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host) jobs.push_back(start_staying(host));
  for (const Launched& job : jobs) expect_formed(job, 0, 2);
  Launched spare = start_staying(2);
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    return spare.error().find("host2 waits to take the place") != std::string::npos;
  })) << spare.error();
  EXPECT_EQ(spare.output(), "");
  jobs[1].kill(SIGKILL);
  expect_formed(jobs[0], 1, 2);
  expect_formed(spare, 1, 2);
  finish();
  EXPECT_EQ(jobs[0].wait(), 0) << jobs[0].error();
  EXPECT_EQ(spare.wait(), 0) << spare.error();
}

TEST_F(ElasticNodes, TooFewAreNamedAtTheDeadline) {
  JOIN_OR_SKIP(2, "2:3");
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host)
    jobs.push_back(start_staying(host, {"--timeout", "4", "--rdzv-last-call", "2"}));
  for (const Launched& job : jobs) expect_formed(job, 0, 2);
  jobs[1].kill(SIGKILL);
  EXPECT_EQ(jobs[0].wait(), 1) << jobs[0].error();
  EXPECT_THAT(jobs[0].error(), HasSubstr("could not be formed anew: 1 of at least 2 nodes did not "
                                         "come within 4.0 s"));
  const auto faults = faults_in(jobs[0].error());
  ASSERT_THAT(faults, SizeIs(2)) << jobs[0].error();
  EXPECT_EQ(nlohmann::json::parse(faults[1])["kind"], "too_few_nodes");
  EXPECT_TRUE(jobs[0].all_gone(milliseconds(0)));
}

TEST_F(ElasticNodes, AnInterruptEndsAllWhileTheyWait) {
  JOIN_OR_SKIP(3, "3");
  std::vector<Launched> jobs;
  for (int host = 0; host < 3; ++host) jobs.push_back(start_staying(host));
  for (const Launched& job : jobs) expect_formed(job, 0, 3);
  jobs[2].kill(SIGKILL);
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    return jobs[1].error().find("waiting up to") != std::string::npos;
  })) << jobs[1].error();
  jobs[1].kill(SIGTERM);
  for (const std::size_t host : {0u, 1u}) {
    EXPECT_EQ(jobs[host].wait(), 128 + SIGTERM) << jobs[host].error();
    EXPECT_THAT(jobs[host].error(), HasSubstr("(host host1) was told to end by SIGTERM"));
    EXPECT_TRUE(jobs[host].all_gone(milliseconds(0)));
  }
}

TEST_F(ElasticNodes, WithoutRestartsALostNodeEndsTheJob) {
  JOIN_OR_SKIP(2, "1:2");
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host) jobs.push_back(start_staying(host, {"--max-restarts", "0"}));
  for (const Launched& job : jobs) expect_formed(job, 0, 2);
  jobs[1].kill(SIGKILL);
  EXPECT_EQ(jobs[0].wait(), 1) << jobs[0].error();
  EXPECT_THAT(jobs[0].error(), HasSubstr("the launcher of node 1 (host host1) is gone"));
}

TEST_F(ElasticNodes, GrowsFromOneWithoutRestarts) {
  JOIN_OR_SKIP(2, "1:2");
  Launched first = start_staying(0, {"--max-restarts", "0", "--rdzv-last-call", "0"});
  expect_formed(first, 0, 1);
  Launched second = start_staying(1, {"--max-restarts", "0"});
  expect_formed(first, 1, 2);
  expect_formed(second, 1, 2);
  finish();
  EXPECT_EQ(first.wait(), 0) << first.error();
  EXPECT_EQ(second.wait(), 0) << second.error();
  EXPECT_THAT(first.error(), Not(HasSubstr("lockstep: fault")));
}

}  // namespace
}  // namespace lockstep::launch::testing
