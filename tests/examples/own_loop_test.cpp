// A training loop of the user's own learns, and learns the same on any number of ranks.
#include <cstdlib>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/net/socket.h>

#include "one_thread.h"

namespace lockstep::examples {
namespace {

// The loss of each epoch. A line from a rank that should be silent would count double.
std::vector<double> losses_by_epoch(const std::string& output) {
  std::vector<double> found;
  for (const std::string& line : launch::testing::lines_of(output))
    if (const auto at = line.find("loss "); at != std::string::npos)
      found.push_back(std::atof(line.c_str() + at + 5));
  return found;
}

std::vector<double> losses_of(Launched& job) {
  EXPECT_EQ(job.wait(), 0) << job.error();
  return losses_by_epoch(job.output());
}

void expect_same(const std::vector<double>& got, const std::vector<double>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t epoch = 0; epoch < got.size(); ++epoch)
    EXPECT_NEAR(got[epoch], wanted[epoch], 1e-6) << "epoch " << epoch + 1;
}

TEST(OwnLoop, LearnsTheSameOnAnyNumberOfRanks) {
  Launched alone({OWN_LOOP}, kOneThread);
  const std::vector<double> one = losses_of(alone);
  ASSERT_EQ(one.size(), 10u) << alone.output();
  EXPECT_LT(one.back(), one.front() / 5);

  // Three ranks cannot have equally many of a step's 128 samples.
  for (const int num_ranks : {2, 3}) {
    Launched several = run_ranks(num_ranks, OWN_LOOP);
    expect_same(losses_of(several), one);
  }
}

TEST(OwnLoop, RunsWithTorchrunsVariables) {
  const std::string port = std::to_string(net::free_port("127.0.0.1"));
  const auto start = [&](const std::string& rank) {
    return Launched({OWN_LOOP},
                    {"OMP_NUM_THREADS=1", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "RANK=" + rank,
                     "LOCAL_RANK=" + rank, "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port});
  };
  Launched second = start("1");
  Launched first = start("0");
  const std::vector<double> told = losses_of(first);
  ASSERT_EQ(told.size(), 10u);
  EXPECT_LT(told.back(), told.front() / 5);
  EXPECT_TRUE(losses_of(second).empty());
}

}  // namespace
}  // namespace lockstep::examples
