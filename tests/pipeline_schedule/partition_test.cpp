#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/schedule/partition.h>

namespace lockstep::pipeline {
namespace {

double dearest_stage(const std::vector<double>& costs, const Cuts& cuts) {
  double dearest = 0;
  for (std::size_t stage = 0; stage + 1 < cuts.size(); ++stage) {
    double sum = 0;
    for (int block = cuts[stage]; block < cuts[stage + 1]; ++block)
      sum += costs[static_cast<std::size_t>(block)];
    dearest = std::max(dearest, sum);
  }
  return dearest;
}

// The least cost over all ways to cut.
double least_of_all(const std::vector<double>& costs, Cuts cuts, int stages_left) {
  const int num_blocks = static_cast<int>(costs.size());
  if (stages_left == 1) {
    cuts.push_back(num_blocks);
    return dearest_stage(costs, cuts);
  }
  double least = std::numeric_limits<double>::infinity();
  for (int next = cuts.back() + 1; next + stages_left - 1 <= num_blocks; ++next) {
    cuts.push_back(next);
    least = std::min(least, least_of_all(costs, cuts, stages_left - 1));
    cuts.pop_back();
  }
  return least;
}

std::string refusal_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Partition, EqualBlocksMakeStagesThatDifferByOne) {
  EXPECT_EQ(partition(std::vector<double>(12, 1), 4), (Cuts{0, 3, 6, 9, 12}));
  const Cuts cuts = partition(std::vector<double>(10, 1), 4);
  for (std::size_t stage = 0; stage < 4; ++stage) {
    EXPECT_GE(cuts[stage + 1] - cuts[stage], 2);
    EXPECT_LE(cuts[stage + 1] - cuts[stage], 3);
  }
}

TEST(Partition, AHeavyHeadLeavesTheLastStageFewerBlocks) {
  EXPECT_EQ(partition({1, 1, 1, 1, 1, 1, 3}, 3), (Cuts{0, 3, 6, 7}));
  EXPECT_EQ(partition({4, 1, 1, 1, 1}, 2), (Cuts{0, 1, 5}));
}

TEST(Partition, IsTheBestOfAll) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<double> costs(1 + random() % 9);
    for (double& cost : costs) cost = random() % 4 == 0 ? 0 : 0.1 * (random() % 50);
    const int stages = static_cast<int>(1 + random() % costs.size());
    const Cuts cuts = partition(costs, stages);
    check_cuts(cuts, static_cast<int>(costs.size()), stages);
    EXPECT_NEAR(dearest_stage(costs, cuts), least_of_all(costs, {0}, stages), 1e-6);
  }
}

TEST(Partition, OfNothingThatCosts) {
  EXPECT_NO_THROW(check_cuts(partition({0, 0, 0}, 3), 3, 3));
  EXPECT_NO_THROW(check_cuts(partition({0, 0, 0}, 2), 3, 2));
}

TEST(Partition, RefusesMoreStagesThanBlocks) {
  EXPECT_NE(refusal_of([] {
              partition({1, 1, 1}, 4);
            }).find("3 blocks cannot be cut into 4 stages"),
            std::string::npos);
  EXPECT_NE(refusal_of([] { partition({}, 1); }).find("0 blocks"), std::string::npos);
  EXPECT_NE(refusal_of([] { partition({1}, 0); }).find("0 stages"), std::string::npos);
  EXPECT_NE(refusal_of([] { partition({1, -1}, 1); }).find("block 1"), std::string::npos);
  EXPECT_NE(refusal_of([] { partition({1, std::nan("")}, 1); }).find("block 1"), std::string::npos);
}

TEST(Partition, RefusesCutsThatAreNone) {
  EXPECT_NO_THROW(check_cuts({0, 1, 5}, 5, 2));
  for (const Cuts& cuts : {Cuts{}, {0, 5}, {1, 2, 5}, {0, 2, 4}, {0, 0, 5}, {0, 5, 5}, {0, 6, 5}})
    EXPECT_NE(refusal_of([&] { check_cuts(cuts, 5, 2); }).find("give 3 numbers"),
              std::string::npos);
  EXPECT_NE(refusal_of([] { check_cuts({0, 1, 2, 3}, 2, 3); }).find("2 blocks"), std::string::npos);
}

}  // namespace
}  // namespace lockstep::pipeline
