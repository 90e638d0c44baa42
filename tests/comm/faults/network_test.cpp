// Network failures on TCP links that only the clock may notice.
#include <cstdlib>
#include <map>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

#include "../../launch/network.h"
#include "bad_wire.h"
#include "collective.h"

namespace lockstep::comm::faults {
namespace {

using launch::testing::Network;

constexpr int kRanks = 3;

// Rank 0 decides when to stop; all ranks print a hash of all results.
void work_for(Rank& rank, milliseconds span, std::size_t count, milliseconds timeout) {
  const auto end = Clock::now() + span;
  std::uint32_t all = 0;
  std::uint32_t first = 0;
  int round = 0;
  rank.say("ready");
  while (true) {
    std::vector<std::byte> stop(1, std::byte{Clock::now() > end});
    rank.begin({.root = 0, .operation = Operation::broadcast}, timeout);
    broadcast(rank.transport(), Algorithm::direct, stop, 0);
    if (stop.front() != std::byte{0}) break;
    // The numbers are always the same, so every round must give the same bits.
    const std::uint32_t sum =
        run(rank, {Operation::all_reduce, Algorithm::direct, count}, 0, timeout);
    const std::uint32_t gathered =
        run(rank, {Operation::all_gather, Algorithm::ring, count / 4}, 0, timeout);
    const std::uint32_t both = sum * 31 + gathered;
    if (round++ == 0) first = both;
    if (both != first) rank.say(fmt::format("wrong result in round {}", round));
    all = all * 7 + both;
  }
  rank.say(fmt::format("result {} after {} rounds", all, round));
}

void expect_undisturbed(Job& job) {
  std::string first;
  for (int rank = 0; rank < job.size(); ++rank) {
    const Outcome outcome = job.outcome(rank, milliseconds(60'000));
    ASSERT_TRUE(outcome.finished) << "rank " << rank << ": " << outcome.text;
    EXPECT_EQ(outcome.said.find("wrong"), std::string::npos) << outcome.said;
    const auto at = outcome.said.find("result");
    ASSERT_NE(at, std::string::npos) << outcome.said;
    const std::string result = outcome.said.substr(at, outcome.said.find('\n', at) - at);
    if (rank == 0) first = result;
    EXPECT_EQ(result, first);
  }
}

// A job in which every connection runs through a BadWire of its own.
struct WiredJob {
  std::map<std::pair<int, int>, std::unique_ptr<BadWire>> wires;
  std::unique_ptr<Job> job;

  explicit WiredJob(const std::function<void(Rank&)>& body) {
    JobOptions options{.media = Media::tcp};
    options.reroute = [this](int reader, int of, EndpointAddress& address) {
      if (reader <= of) return;
      auto& wire = wires[{reader, of}];
      wire = std::make_unique<BadWire>(address.tcp);
      address.tcp = wire->address();
    };
    job = std::make_unique<Job>(kRanks, options, body);
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(job->says(rank, "ready"));
  }
};

TEST(BadNetwork, ResetConnectionsAreMadeAgain) {
  WiredJob wired(
      [](Rank& rank) { work_for(rank, milliseconds(2500), 200'000, milliseconds(20'000)); });
  for (int time = 0; time < 12; ++time) {
    std::this_thread::sleep_for(milliseconds(150));
    auto wire = wired.wires.begin();
    std::advance(wire, time % wired.wires.size());
    wire->second->cut();
    if (time % 4 == 3)
      for (auto& [ends, every] : wired.wires) every->cut();
  }
  expect_undisturbed(*wired.job);
  int connections = 0;
  for (auto& [ends, wire] : wired.wires) connections += wire->connections();
  EXPECT_GT(connections, kRanks) << "nothing was cut";
}

// Calls are short: a message that has to be sent again may belong to a call whose result has
// already overwritten its input.
TEST(BadNetwork, ShortCallsSurviveResetsToo) {
  for (const std::size_t count : {100u, 4000u}) {
    WiredJob wired(
        [count](Rank& rank) { work_for(rank, milliseconds(2000), count, milliseconds(20'000)); });
    for (int time = 0; time < 100; ++time) {
      std::this_thread::sleep_for(milliseconds(17));
      auto wire = wired.wires.begin();
      std::advance(wire, time % wired.wires.size());
      wire->second->cut();
    }
    expect_undisturbed(*wired.job);
    if (HasFailure()) return;
  }
}

TEST(BadNetwork, AFlippedBitIsNeverAResult) {
  WiredJob wired(
      [](Rank& rank) { work_for(rank, milliseconds(2500), 200'000, milliseconds(20'000)); });
  for (int time = 0; time < 12; ++time) {
    std::this_thread::sleep_for(milliseconds(150));
    auto wire = wired.wires.begin();
    std::advance(wire, time % wired.wires.size());
    wire->second->flip();
  }
  expect_undisturbed(*wired.job);
  int flips = 0;
  for (auto& [ends, wire] : wired.wires) flips += wire->flips();
  EXPECT_GT(flips, 3) << "hardly anything was flipped";
}

TEST(BadNetwork, AWireThatFallsSilentForASecondCostsThatSecond) {
  WiredJob wired(
      [](Rank& rank) { work_for(rank, milliseconds(2500), 100'000, milliseconds(20'000)); });
  std::this_thread::sleep_for(milliseconds(200));
  for (auto& [ends, wire] : wired.wires) wire->hold(true);
  std::this_thread::sleep_for(milliseconds(1000));
  for (auto& [ends, wire] : wired.wires) wire->hold(false);
  expect_undisturbed(*wired.job);
}

// The wire stays silent for longer than a call may take: every rank fails in time with the reason.
TEST(BadNetwork, AWireThatStaysSilentIsNamedAtTheDeadline) {
  WiredJob wired(
      [](Rank& rank) { work_for(rank, milliseconds(30'000), 10'000, milliseconds(1500)); });
  const auto begin = Clock::now();
  for (auto& [ends, wire] : wired.wires)
    if (ends == std::pair(2, 0) || ends == std::pair(2, 1)) wire->hold(true);
  for (const int rank : {0, 1}) {
    const Outcome outcome = wired.job->outcome(rank, milliseconds(15'000));
    ASSERT_TRUE(outcome.failed) << outcome.text;
    EXPECT_EQ(outcome.fault, Fault::timeout) << outcome.text;
    EXPECT_NE(std::find(outcome.ranks.begin(), outcome.ranks.end(), 2), outcome.ranks.end())
        << outcome.text;
  }
  const Outcome alone = wired.job->outcome(2, milliseconds(15'000));
  EXPECT_TRUE(alone.failed) << alone.text;
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(25)) << "the work would go on for 30";
}

// Ranks on hosts of their own, joined by a bridge.
class Hosts : public ::testing::Test {
 protected:
  JobOptions options() const {
    JobOptions all;
    for (int host = 0; host < kRanks; ++host) {
      all.namespaces.push_back(network_.name(host));
      all.hosts.push_back(Network::address(host));
    }
    return all;
  }
  Network network_{kRanks};
};

TEST_F(Hosts, ALinkThatFlapsCostsNothingButTime) {
  if (!network_.works()) GTEST_SKIP() << "this process may not make network namespaces";
  Job job(kRanks, options(),
          [](Rank& rank) { work_for(rank, milliseconds(4000), 100'000, milliseconds(20'000)); });
  for (int rank = 0; rank < kRanks; ++rank) ASSERT_TRUE(job.says(rank, "ready"));
  std::this_thread::sleep_for(milliseconds(300));
  network_.set_link(1, "down");
  std::this_thread::sleep_for(milliseconds(1500));
  network_.set_link(1, "up");
  expect_undisturbed(job);
}

TEST_F(Hosts, ASlowLinkGivesTheSameBitsAndNoFalseAlarm) {
  if (!network_.works()) GTEST_SKIP() << "this process may not make network namespaces";
  for (int host = 0; host < kRanks; ++host) {
    const std::string command = "tc -n " + network_.name(host) +
                                " qdisc add dev eth0 root tbf rate 100mbit burst 32kb latency 50ms"
                                " > /dev/null 2>&1";
    if (std::system(command.c_str()) != 0) GTEST_SKIP() << "there is no tbf here";
  }
  Job job(kRanks, options(),
          [](Rank& rank) { work_for(rank, milliseconds(3000), 500'000, milliseconds(10'000)); });
  expect_undisturbed(job);
}

}  // namespace
}  // namespace lockstep::comm::faults
