#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep::nn {
namespace {

TEST(ContextParallel, OnOneRank) { ranks::expect_cells_pass(1, {"--all"}); }
TEST(ContextParallel, OnTwoRanks) { ranks::expect_cells_pass(2, {"--all"}); }
TEST(ContextParallel, OnThreeRanks) { ranks::expect_cells_pass(3, {"--all"}); }
TEST(ContextParallel, OnFourRanks) { ranks::expect_cells_pass(4, {"--all"}); }
TEST(ContextParallel, MemoryOnFourRanks) { ranks::expect_cells_pass(4, {"--memory"}); }
TEST(ContextParallel, OnGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const int num_ranks : {1, 2, 4}) ranks::expect_cells_pass(num_ranks, {"--gpu"});
}

}  // namespace
}  // namespace lockstep::nn
