#include <lockstep/data/sampling/distributed_sampler.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"

namespace lockstep::data {
namespace {

using ::testing::HasSubstr;

std::vector<std::int64_t> order(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
  const Permutation permutation(size, seed, epoch);
  std::vector<std::int64_t> order;
  for (std::int64_t k = 0; k < size; ++k) order.push_back(permutation(k));
  return order;
}

TEST(Permutation, HasEachNumberOnce) {
  std::vector<std::int64_t> sizes = {1000, 1023, 1024, 1025, 4096, 4097, 100003};
  for (std::int64_t size = 0; size <= 300; ++size) sizes.push_back(size);
  for (const std::int64_t size : sizes) {
    std::vector<std::int64_t> sorted = order(size, 42, 3);
    std::sort(sorted.begin(), sorted.end());
    for (std::int64_t k = 0; k < size; ++k)
      ASSERT_EQ(sorted[static_cast<std::size_t>(k)], k) << "of " << size;
  }
}

TEST(Permutation, DiffersByEpochAndSeed) {
  std::set<std::vector<std::int64_t>> seen;
  for (std::uint64_t seed = 0; seed < 8; ++seed)
    for (std::int64_t epoch = 0; epoch < 8; ++epoch) seen.insert(order(100, seed, epoch));
  EXPECT_EQ(seen.size(), 64u);
  EXPECT_EQ(order(100, 7, 2), order(100, 7, 2));
}

// Runs are resumed on other machines and with later versions, so these numbers must never change.
TEST(Permutation, IsTheSameForEver) {
  EXPECT_THAT(order(10, 0, 0), ::testing::ElementsAre(7, 2, 1, 4, 5, 8, 3, 6, 0, 9));
  EXPECT_EQ(Permutation(std::int64_t{1} << 62, 1, 2)(3), 1639621848615449283);
}

// Every order of a few things occurs about equally often.
TEST(Permutation, ReachesEveryOrderOfAFew) {
  for (const std::int64_t size : {2, 3, 4, 5}) {
    std::map<std::vector<std::int64_t>, int> counts;
    constexpr int draws = 1200;
    for (int epoch = 0; epoch < draws; ++epoch) ++counts[order(size, 1, epoch)];
    const double orders = std::tgamma(static_cast<double>(size) + 1);
    ASSERT_EQ(static_cast<double>(counts.size()), orders) << size;
    double chi_squared = 0;
    for (const auto& [what, count] : counts)
      chi_squared += std::pow(count - draws / orders, 2) / (draws / orders);
    // Five standard deviations above the expected value.
    EXPECT_LT(chi_squared, orders - 1 + 5 * std::sqrt(2 * (orders - 1))) << size;
  }
}

// The new place of one thing says nothing about the new place of its neighbour.
TEST(Permutation, LeavesNoTraceOfTheOrderBefore) {
  constexpr std::int64_t size = 100000;
  const auto shuffled = order(size, 5, 0);
  std::vector<int> distances(10);  // distance from one to the next, in tenths of the size
  for (std::size_t k = 0; k + 1 < size; ++k)
    ++distances[static_cast<std::size_t>((shuffled[k + 1] - shuffled[k] + size) % size * 10 /
                                         size)];
  for (const int count : distances) EXPECT_NEAR(count, size / 10, 500);
  double product = 0;
  for (std::size_t k = 0; k < size; ++k)
    product += (static_cast<double>(k) / size - 0.5) *
               (static_cast<double>(shuffled[k]) / size - 0.5) * 12 / size;
  EXPECT_NEAR(product, 0, 0.02);
}

TEST(Permutation, OfMoreThanThereCanBe) {
  const Permutation largest(std::int64_t{1} << 62, 0, 0);
  EXPECT_LT(largest((std::int64_t{1} << 62) - 1), std::int64_t{1} << 62);
  EXPECT_THAT(usage_error([] { Permutation((std::int64_t{1} << 62) + 1, 0, 0); }),
              HasSubstr("a permutation of 4611686018427387905 places"));
  EXPECT_THAT(usage_error([] { Permutation(-1, 0, 0); }), HasSubstr("of -1 places"));
}

}  // namespace
}  // namespace lockstep::data
