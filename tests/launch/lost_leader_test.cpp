// The host at which all launchers have met is lost, and the next one takes its place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>

#include "elastic_nodes.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class LostLeader : public ElasticNodes {
 protected:
  std::vector<Launched> start_all(int size) {
    std::vector<Launched> jobs;
    for (int host = 0; host < size; ++host) jobs.push_back(start_staying(host));
    for (const Launched& job : jobs) expect_formed(job, 0, size);
    return jobs;
  }
};

TEST_F(LostLeader, TheOthersGoOn) {
  JOIN_OR_SKIP(3, "2:3");
  std::vector<Launched> jobs = start_all(3);
  jobs[0].kill(SIGKILL);
  EXPECT_TRUE(jobs[0].all_gone(milliseconds(60'000)));
  for (const std::size_t host : {1u, 2u}) expect_formed(jobs[host], 1, 2);
  finish();
  for (const std::size_t host : {1u, 2u}) {
    EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
    EXPECT_THAT(jobs[host].output(), HasSubstr("generation=1 restarts=1"));
    const auto faults = faults_in(jobs[host].error());
    ASSERT_THAT(faults, SizeIs(1)) << jobs[host].error();
    const auto fault = nlohmann::json::parse(faults[0]);
    EXPECT_EQ(fault["kind"], "node_lost");
    EXPECT_EQ(fault["node_rank"], 0);
    EXPECT_EQ(fault["host"], "host0");
    EXPECT_EQ(fault["restarted"], true);
    EXPECT_TRUE(jobs[host].all_gone(milliseconds(0)));
  }
}

TEST_F(LostLeader, MoreThanOnceAndSeveralAtOnce) {
  JOIN_OR_SKIP(5, "2:5");
  std::vector<Launched> jobs = start_all(5);
  const auto node_rank_is = [&](std::size_t host, const std::string& node) {
    return jobs[host].output().find("node=" + node + " ") != std::string::npos;
  };
  // Three of five hosts are left, because the next leader is lost, too.
  std::vector<std::size_t> left;
  for (std::size_t host = 0; host < jobs.size(); ++host) {
    if (node_rank_is(host, "0/5") || node_rank_is(host, "1/5")) {
      jobs[host].kill(SIGKILL);
    } else {
      left.push_back(host);
    }
  }
  ASSERT_EQ(left.size(), 3u);
  for (const std::size_t host : left) expect_formed(jobs[host], 1, 3);
  for (const std::size_t host : left)
    if (node_rank_is(host, "0/3")) jobs[host].kill(SIGKILL);
  std::erase_if(left, [&](std::size_t host) { return node_rank_is(host, "0/3"); });
  ASSERT_EQ(left.size(), 2u);
  for (const std::size_t host : left) expect_formed(jobs[host], 2, 2);
  finish();
  for (const std::size_t host : left) {
    EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
    EXPECT_THAT(jobs[host].output(), HasSubstr("generation=2 restarts=2"));
  }
}

TEST_F(LostLeader, OnlyTheMajorityGoesOn) {
  JOIN_OR_SKIP(3, "1:3");
  std::vector<Launched> jobs = start_all(3);
  network_->set_link(0, "down");
  for (const std::size_t host : {1u, 2u}) expect_formed(jobs[host], 1, 2);
  EXPECT_EQ(jobs[0].wait(), 1) << jobs[0].error();
  EXPECT_THAT(jobs[0].error(),
              HasSubstr("only 1 of the 3 nodes of this job are left, not more than "
                        "half"));
  EXPECT_EQ(count_of("launcher=", jobs[0].output()), 2);
  finish();
  for (const std::size_t host : {1u, 2u}) EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
}

TEST_F(LostLeader, OneThatOnlyItCannotHearGoesNowhere) {
  JOIN_OR_SKIP(3, "1:3");
  std::vector<Launched> jobs = start_all(3);
  // Packets from host1 to host0 are lost; host2 hears both.
  network_->drop_toward(1, 0);
  for (const std::size_t host : {0u, 2u}) expect_formed(jobs[host], 1, 2);
  EXPECT_EQ(jobs[1].wait(milliseconds(40'000)), 1) << jobs[1].error();
  EXPECT_THAT(jobs[1].error(), HasSubstr("the job could not be formed anew"));
  EXPECT_EQ(count_of("launcher=", jobs[1].output()), 2);
  finish();
  for (const std::size_t host : {0u, 2u}) EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
}

TEST_F(LostLeader, OfTwoNodesOnlyNodeZeroGoesOn) {
  JOIN_OR_SKIP(2, "1:2");
  std::vector<Launched> jobs = start_all(2);
  network_->set_link(1, "down");
  expect_formed(jobs[0], 1, 1);
  EXPECT_EQ(jobs[1].wait(), 1) << jobs[1].error();
  EXPECT_THAT(jobs[1].error(), HasSubstr("of two nodes, only node 0 can go on alone"));
  finish();
  EXPECT_EQ(jobs[0].wait(), 0) << jobs[0].error();
}

TEST_F(LostLeader, FindsTheJobAgainAtAnotherEndpoint) {
  JOIN_OR_SKIP(3, "2:3");
  endpoint_ = Network::address(0) + ":29400," + Network::address(1) + ":29401," +
              Network::address(2) + ":29401";
  std::vector<Launched> jobs = start_all(3);
  jobs[0].kill(SIGKILL);
  for (const std::size_t host : {1u, 2u}) expect_formed(jobs[host], 1, 2);
  // With the same flags it does not begin a job of its own at the first endpoint.
  Launched back = start_staying(0);
  expect_formed(back, 2, 3);
  for (const std::size_t host : {1u, 2u}) expect_formed(jobs[host], 2, 3);
  // It is a normal member of the job: the leader may be lost once more.
  const std::size_t leader = jobs[1].output().find("node=0/2 ") != std::string::npos ? 1 : 2;
  jobs[leader].kill(SIGKILL);
  expect_formed(back, 3, 2);
  expect_formed(jobs[3 - leader], 3, 2);
  finish();
  EXPECT_EQ(back.wait(), 0) << back.error();
  EXPECT_EQ(jobs[3 - leader].wait(), 0) << jobs[3 - leader].error();
}

TEST_F(LostLeader, OneThatWaitsFindsTheJobAgain) {
  JOIN_OR_SKIP(4, "3");
  endpoint_ = Network::address(0) + ":29400," + Network::address(1) + ":29400";
  std::vector<Launched> jobs = start_all(3);
  Launched spare = start_staying(3);
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    return spare.error().find("host3 waits to take the place") != std::string::npos;
  })) << spare.error();
  jobs[0].kill(SIGKILL);
  for (const std::size_t host : {1u, 2u}) expect_formed(jobs[host], 1, 3);
  expect_formed(spare, 1, 3);
  finish();
  for (const std::size_t host : {1u, 2u}) EXPECT_EQ(jobs[host].wait(), 0) << jobs[host].error();
  EXPECT_EQ(spare.wait(), 0) << spare.error();
}

TEST_F(LostLeader, WithoutRestartsTheJobEnds) {
  JOIN_OR_SKIP(3, "1:3");
  std::vector<Launched> jobs;
  for (int host = 0; host < 3; ++host) jobs.push_back(start_staying(host, {"--max-restarts", "0"}));
  for (const Launched& job : jobs) expect_formed(job, 0, 3);
  jobs[0].kill(SIGKILL);
  for (const std::size_t host : {1u, 2u}) {
    EXPECT_EQ(jobs[host].wait(), 1) << jobs[host].error();
    EXPECT_THAT(jobs[host].error(), HasSubstr("the launcher of node 0 (host host0) is gone"));
  }
}

}  // namespace
}  // namespace lockstep::launch::testing
