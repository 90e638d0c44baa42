#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep::plan {
namespace {

TEST(Peaks, OfOneRank) { ranks::expect_cells_pass(1, {"--peaks"}); }
TEST(Peaks, OfTwoRanks) { ranks::expect_cells_pass(2, {"--peaks"}); }
TEST(Peaks, OfThreeRanks) { ranks::expect_cells_pass(3, {"--peaks"}); }
TEST(Peaks, OfFourRanks) { ranks::expect_cells_pass(4, {"--peaks"}); }

TEST(Peaks, OnGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const int num_ranks : {1, 2}) ranks::expect_cells_pass(num_ranks, {"--peaks-gpu"});
}

}  // namespace
}  // namespace lockstep::plan
