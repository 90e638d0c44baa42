// Jobs whose launchers find each other through etcd, even if the leader is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <thread>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/launch/rendezvous/etcd.h>
#include <lockstep/net/socket.h>

#include "etcd_server.h"
#include "network.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// All launchers are on loopback, and hosts are only names.
class EtcdJob : public ::testing::Test {
 protected:
  void SetUp() override {
    ETCD_OR_SKIP();
    ASSERT_TRUE(etcd_.start()) << etcd_.log();
  }

  std::vector<std::string> flags(const std::string& nodes) const {
    return {"--nnodes",         nodes,
            "--rdzv-backend",   "etcd",
            "--rdzv-endpoint",  etcd_.address().text(),
            "--rdzv-id",        "job",
            "--secret-file",    secret_,
            "--max-restarts",   "5",
            "--nproc-per-node", "1"};
  }

  Launched start(const std::string& nodes, const std::string& host,
                 const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = flags(nodes);
    all.insert(all.end(), {"--local-addr", host});
    all.insert(all.end(), more.begin(), more.end());
    all.insert(all.end(), {RANK_PROGRAM, go()});
    return Launched::run(std::move(all));
  }

  std::string go() const { return (folder_.path() / "go").string(); }
  void finish() const { folder_.write("go", ""); }

  static void expect_formed(const Launched& job, int generation, int num_nodes) {
    const std::string words = "/" + std::to_string(num_nodes) +
                              " flight=yes generation=" + std::to_string(generation) + " ";
    EXPECT_TRUE(job.says(words)) << words << "\n" << job.output() << job.error();
  }

  static bool tells(const Launched& job, const std::string& words) {
    return eventually(milliseconds(60'000),
                      [&] { return job.error().find(words) != std::string::npos; });
  }

  // Returns the job of node 0 first.
  std::vector<Launched> start_two() const {
    std::vector<Launched> jobs, ordered;
    for (const char* host : {"host0", "host1"}) jobs.push_back(start("1:2", host));
    for (const Launched& job : jobs) expect_formed(job, 0, 2);
    const std::size_t leader = jobs[0].output().find("node=0/2") != std::string::npos ? 0 : 1;
    EXPECT_THAT(jobs[leader].output(), HasSubstr("node=0/2"));
    ordered.push_back(std::move(jobs[leader]));
    ordered.push_back(std::move(jobs[1 - leader]));
    return ordered;
  }

  Etcd::Value value_of(const std::string& key) const {
    const Deadline deadline = Deadline::after(milliseconds(20'000));
    return Etcd({etcd_.address()}).transact({.reads = {key}}, deadline).values[0];
  }

  Folder folder_;
  std::string secret_ = folder_.write("secret", std::string(32, 's'), 0600);
  EtcdServer etcd_;
};

TEST_F(EtcdJob, LaunchersMeet) {
  finish();
  std::vector<Launched> jobs;
  // The launcher that asks to be node 0 is node 0, whoever comes first.
  jobs.push_back(start("2", "host1", {"--node-rank", "1"}));
  jobs.push_back(start("2", "host0", {"--node-rank", "0"}));
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(), 0) << job.error();
    expect_formed(job, 0, 2);
    EXPECT_THAT(faults_in(job.error()), SizeIs(0));
  }
  EXPECT_THAT(jobs[0].output(), HasSubstr("node=1/2 "));
  EXPECT_THAT(jobs[1].output(), HasSubstr("node=0/2 "));
  EXPECT_FALSE(value_of("lockstep/job/leader").exists());
  EXPECT_FALSE(value_of("lockstep/job/term").exists());
}

TEST_F(EtcdJob, OneOfTwoGoesOnWithoutNodeZeroAndALateHostFindsIt) {
  std::vector<Launched> jobs = start_two();
  jobs[0].kill(SIGKILL);
  EXPECT_TRUE(jobs[0].all_gone(milliseconds(60'000)));
  expect_formed(jobs[1], 1, 1);
  Launched late = start("1:2", "host2");
  expect_formed(late, 2, 2);
  expect_formed(jobs[1], 2, 2);
  finish();
  EXPECT_EQ(late.wait(), 0) << late.error();
  EXPECT_EQ(jobs[1].wait(), 0) << jobs[1].error();
  EXPECT_THAT(jobs[1].output(), HasSubstr("generation=1 restarts=1"));
  const auto faults = faults_in(jobs[1].error());
  ASSERT_THAT(faults, SizeIs(1)) << jobs[1].error();
  const auto fault = nlohmann::json::parse(faults[0]);
  EXPECT_EQ(fault["kind"], "node_lost");
  EXPECT_EQ(fault["node_rank"], 0);
  EXPECT_EQ(fault["restarted"], true);
}

TEST_F(EtcdJob, AStoppedLeaderIsNoneAnyMore) {
  std::vector<Launched> jobs = start_two();
  jobs[0].kill(SIGSTOP);
  expect_formed(jobs[1], 1, 1);
  jobs[0].kill(SIGCONT);
  // It notices, ends its ranks, and joins the launcher that has taken its place.
  for (const Launched& job : jobs) expect_formed(job, 2, 2);
  EXPECT_THAT(jobs[0].output(), HasSubstr("node=1/2 flight=yes generation=2 "));
  EXPECT_THAT(jobs[0].output(), Not(HasSubstr("/1 flight=yes")));
  EXPECT_THAT(jobs[0].output(), Not(HasSubstr("generation=1 ")));
  finish();
  for (Launched& job : jobs) EXPECT_EQ(job.wait(), 0) << job.error();
}

TEST_F(EtcdJob, ThreeGoOnWhereTheElectedIsReached) {
  std::vector<Launched> jobs;
  for (const char* host : {"host0", "host1", "host2"}) jobs.push_back(start("2:3", host));
  for (const Launched& job : jobs) expect_formed(job, 0, 3);
  std::size_t leader = 0;
  while (leader < 2 && jobs[leader].output().find("node=0/3") == std::string::npos) ++leader;
  jobs[leader].kill(SIGKILL);
  for (std::size_t i = 0; i < jobs.size(); ++i)
    if (i != leader) expect_formed(jobs[i], 1, 2);
  finish();
  for (std::size_t i = 0; i < jobs.size(); ++i)
    if (i != leader) {
      EXPECT_EQ(jobs[i].wait(), 0) << jobs[i].error();
    }
}

TEST_F(EtcdJob, OneThatNeverTookPartMayBeElectedAndGoesOnFromThere) {
  std::vector<Launched> jobs = start_two();
  Launched spare = start("1:2", "host2");
  EXPECT_TRUE(tells(spare, "host2 waits to take the place")) << spare.error();
  jobs[1].kill(SIGSTOP);
  jobs[0].kill(SIGKILL);
  EXPECT_TRUE(tells(spare, "this host takes the place of node 0")) << spare.error();
  jobs[1].kill(SIGCONT);
  expect_formed(spare, 1, 2);
  expect_formed(jobs[1], 1, 2);
  finish();
  EXPECT_EQ(jobs[1].wait(), 0) << jobs[1].error();
  EXPECT_EQ(spare.wait(), 0) << spare.error();
  EXPECT_THAT(spare.output(), HasSubstr("node=0/2 flight=yes generation=1 restarts=1"));
}

TEST_F(EtcdJob, TrainingDoesNotNeedEtcd) {
  std::vector<Launched> jobs = start_two();
  etcd_.kill(SIGKILL);
  EXPECT_TRUE(tells(jobs[0], "gives no useful answer")) << jobs[0].error();
  EXPECT_THAT(jobs[0].error(), HasSubstr("a job that runs goes on"));
  EXPECT_EQ(jobs[0].wait(milliseconds(6000)), -1);  // longer than the lease
  ASSERT_TRUE(etcd_.start()) << etcd_.log();
  EXPECT_TRUE(tells(jobs[0], "answers again")) << jobs[0].error();
  EXPECT_EQ(jobs[0].wait(milliseconds(2000)), -1);
  finish();
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(), 0) << job.error();
    EXPECT_THAT(faults_in(job.error()), SizeIs(0));
    EXPECT_EQ(count_of("generation=", job.output()), 1);
  }
}

TEST_F(EtcdJob, AJobThatFailsWithoutEtcdIsFormedWhenItIsBack) {
  const std::string program = "if [ $LOCKSTEP_GENERATION = 0 ]; then echo begun; until [ -e \"$0\" "
                              "]; do sleep 0.05; done; exit 5; fi; exec " +
                              std::string(RANK_PROGRAM);
  std::vector<Launched> jobs;
  for (const char* host : {"host0", "host1"}) {
    std::vector<std::string> all = flags("2");
    all.insert(all.end(), {"--local-addr", host, "sh", "-c", program, go()});
    jobs.push_back(Launched::run(std::move(all)));
  }
  for (const Launched& job : jobs) EXPECT_TRUE(job.says("begun")) << job.error();
  etcd_.kill(SIGSTOP);
  EXPECT_EQ(jobs[0].wait(milliseconds(4500)), -1);  // the lease ends
  finish();
  for (const Launched& job : jobs) EXPECT_TRUE(tells(job, "is started anew")) << job.error();
  EXPECT_EQ(jobs[0].wait(milliseconds(2000)), -1);
  for (const Launched& job : jobs) EXPECT_THAT(job.output(), Not(HasSubstr("generation=1")));
  etcd_.kill(SIGCONT);
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(), 0) << job.error();
    expect_formed(job, 1, 2);
  }
}

TEST_F(EtcdJob, WhatEtcdSaysIsNotTrusted) {
  // A launcher with another secret uses the same name for its job.
  Launched other = start("2", "host0");
  ASSERT_TRUE(eventually(milliseconds(60'000), [&] {
    return value_of("lockstep/job/leader").exists();
  })) << other.error();
  folder_.write("secret", std::string(32, 't'), 0600);
  Launched job = start("2", "host1");
  EXPECT_EQ(job.wait(), 1) << job.error();
  EXPECT_THAT(job.error(), HasSubstr("does not know this job's secret"));
}

std::string nobody() {
  return "127.0.0.1:" + std::to_string(net::local_port(net::listen_tcp({"127.0.0.1", 0})));
}

Launched start_with(const std::string& endpoint, const std::string& secret,
                    const std::string& timeout) {
  return Launched::run({"--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint,
                        "--rdzv-id", "job", "--secret-file", secret, "--timeout", timeout, "true"});
}

TEST(WithoutEtcd, ItIsSaidWithinTheTimeout) {
  const Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  const std::string endpoint = nobody();
  Launched job = start_with(endpoint, secret, "3");
  EXPECT_EQ(job.wait(), 1) << job.error();
  EXPECT_THAT(job.error(),
              HasSubstr("etcd at " + endpoint + " gave no useful answer within 3.0 s"));
  EXPECT_THAT(job.error(), HasSubstr("refused"));
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST(WithoutEtcd, WhatIsNoEtcdIsSaidToBeNone) {
  const Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  const std::string head = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
  for (const std::string& answer :
       {std::string("SSH-2.0-OpenSSH_9.2p1\r\n"), head + "<html>", head + "{}",
        std::string("HTTP/1.1 404 Not Found\r\n\r\nno\x1b[2Jsuch\npage"),
        head + std::string(1 << 20, '{')}) {
    const net::Fd listener = net::listen_tcp({"127.0.0.1", 0});
    std::jthread server([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        std::this_thread::sleep_for(milliseconds(2));
        const net::Fd guest = net::accept(listener);
        if (!guest) continue;
        try {
          net::wait_ready(guest.get(), POLLIN, Deadline::after(milliseconds(2000)));
          net::write_all(guest, std::as_bytes(std::span(answer)),
                         Deadline::after(milliseconds(2000)));
        } catch (const Error&) {  // enough was read
        }
      }
    });
    Launched job =
        start_with("127.0.0.1:" + std::to_string(net::local_port(listener)), secret, "1");
    EXPECT_EQ(job.wait(), 1) << job.error();
    EXPECT_THAT(job.error(), HasSubstr("gave no useful answer within 1.0 s"))
        << answer.substr(0, 60);
    EXPECT_THAT(job.error(), Not(HasSubstr("\x1b")));
    EXPECT_TRUE(job.all_gone(milliseconds(0)));
  }
}

// Two hosts run launchers, and a third runs etcd.
TEST(EtcdNodes, ALeaderThatIsCutOffComesBackAsAnyOther) {
  ETCD_OR_SKIP();
  const Network network(3);
  if (!network.works())
    GTEST_SKIP() << "this process may not make network namespaces (needs root and 'ip')";
  EtcdServer etcd(network.name(2), Network::address(2));
  ASSERT_TRUE(etcd.start()) << etcd.log();
  const Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  const std::string go = (folder.path() / "go").string();
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host)
    jobs.push_back(
        network.run(host, {"--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-endpoint",
                           Network::address(2), "--rdzv-id", "job", "--secret-file", secret,
                           "--max-restarts", "5", "--nproc-per-node", "1", RANK_PROGRAM, go}));
  const auto formed = [&](int host, const std::string& words) {
    const Launched& job = jobs[static_cast<std::size_t>(host)];
    EXPECT_TRUE(job.says(words)) << words << "\n" << job.output() << job.error();
  };
  for (const int host : {0, 1}) formed(host, "/2 flight=yes generation=0 ");
  const int leader = jobs[0].output().find("node=0/2") != std::string::npos ? 0 : 1;
  network.set_link(leader, "down");
  formed(1 - leader, "node=0/1 flight=yes generation=1 ");
  network.set_link(leader, "up");
  for (const int host : {0, 1}) formed(host, "/2 flight=yes generation=2 ");
  EXPECT_THAT(jobs[static_cast<std::size_t>(leader)].output(), Not(HasSubstr("/1 flight=yes")));
  folder.write("go", "");
  for (Launched& job : jobs) EXPECT_EQ(job.wait(), 0) << job.error();
}

}  // namespace
}  // namespace lockstep::launch::testing
