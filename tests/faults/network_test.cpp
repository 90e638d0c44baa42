// Rows 6 and 7: networks that fail, and networks that are bad.
#include <gmock/gmock.h>

#include <cstdlib>
#include <thread>

#include "bad_switch.h"
#include "disturbed.h"

namespace lockstep::faults {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Row06BrokenNetwork : public DisturbedHosts {
 protected:
  Job job() const {
    return {.num_ranks = 1,
            .launcher = {"--nnodes", "3", "--max-restarts", "3"},
            .rank = {"--pace", "50", "--epochs", "6"}};
  }
};

class WholeRow06BrokenNetwork : public Row06BrokenNetwork {};

// The host that is cut off ends; the others go on with the host that waits.
TEST_F(WholeRow06BrokenNetwork, OnlyTheMajorityGoesOn) {
  HOSTS_OR_SKIP(4);
  std::vector<Launched> hosts;
  for (int host = 0; host < 3; ++host) hosts.push_back(start_on(host, job()));
  ASSERT_TRUE(reaches(1)) << hosts[0].error();
  hosts.push_back(start_on(3, job()));
  ASSERT_TRUE(launch::testing::eventually(milliseconds(60'000), [&] {
    return hosts[3].error().find("waits to take the place") != std::string::npos;
  })) << hosts[3].error();
  network_->set_link(2, "down");
  EXPECT_NE(hosts[2].wait(milliseconds(180'000)), 0) << hosts[2].error();
  expect_nothing_left(hosts[2]);
  for (const std::size_t host : {0u, 1u, 3u}) {
    EXPECT_EQ(hosts[host].wait(milliseconds(180'000)), 0) << hosts[host].error();
    expect_nothing_left(hosts[host]);
    if (host == 3) continue;
    const auto fault = only_fault(hosts[host]);
    EXPECT_EQ(fault["kind"], "node_lost");
    EXPECT_EQ(fault["host"], "host2");
  }
  expect_undisturbed_result(3, {"--epochs", "6"});
}

TEST_F(Row06BrokenNetwork, AFlapCostsNoRestart) {
  HOSTS_OR_SKIP(3);
  std::vector<Launched> hosts;
  for (int host = 0; host < 3; ++host) hosts.push_back(start_on(host, job()));
  ASSERT_TRUE(reaches(6)) << hosts[0].error();
  network_->set_link(1, "down");
  std::this_thread::sleep_for(milliseconds(2500));
  network_->set_link(1, "up");
  for (Launched& host : hosts) {
    EXPECT_EQ(host.wait(milliseconds(180'000)), 0) << host.error();
    expect_nothing_left(host);
    EXPECT_THAT(launch::testing::faults_in(host.error()), IsEmpty());
  }
  expect_undisturbed_result(3, {"--epochs", "6"});
}

class Row07BadNetwork : public DisturbedHosts {
 protected:
  void expect_same_bits_and_no_alarm(const std::string& epochs) {
    std::vector<Launched> hosts;
    for (int host = 0; host < 3; ++host)
      hosts.push_back(start_on(host, {.num_ranks = 1,
                                      .launcher = {"--nnodes", "3", "--max-restarts", "1"},
                                      .rank = {"--epochs", epochs}}));
    for (Launched& host : hosts) {
      EXPECT_EQ(host.wait(milliseconds(180'000)), 0) << host.error();
      expect_nothing_left(host);
      EXPECT_THAT(launch::testing::faults_in(host.error()), IsEmpty());
    }
    expect_undisturbed_result(3, {"--epochs", epochs});
  }

  // False if the kernel has no such queueing discipline.
  bool shape(const std::string& discipline) const {
    for (int host = 0; host < 3; ++host)
      if (std::system(("tc -n " + network_->name(host) + " qdisc add dev eth0 root " + discipline +
                       " > /dev/null 2>&1")
                          .c_str()) != 0)
        return false;
    return true;
  }
};

TEST_F(Row07BadNetwork, AHundredMegabits) {
  HOSTS_OR_SKIP(3);
  if (!shape("tbf rate 100mbit burst 32kb latency 50ms")) GTEST_SKIP() << "no tbf here";
  expect_same_bits_and_no_alarm("2");
}

TEST_F(Row07BadNetwork, LossAndDelay) {
  HOSTS_OR_SKIP(3);
  const BadSwitch bad(*network_, 3, {.loss = 0.02, .delay = std::chrono::milliseconds(5)});
  if (!bad.works()) GTEST_SKIP() << "this process may not read and write frames";
  expect_same_bits_and_no_alarm("2");
  EXPECT_GT(bad.num_lost(), 5);
  std::printf("%lld frames passed, %lld were lost\n", static_cast<long long>(bad.num_passed()),
              static_cast<long long>(bad.num_lost()));
}

TEST_F(Row07BadNetwork, LossAndDelayByTheKernel) {
  HOSTS_OR_SKIP(3);
  if (!shape("netem loss 2% delay 5ms 2ms")) GTEST_SKIP() << "no netem here";
  expect_same_bits_and_no_alarm("2");
}

}  // namespace
}  // namespace lockstep::faults
