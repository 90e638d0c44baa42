#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep::shard {
namespace {

TEST(Sharded, BehaviourOnTwoRanks) { ranks::expect_cells_pass(2, {"--behaviour"}); }
TEST(Sharded, BehaviourOnThreeRanks) { ranks::expect_cells_pass(3, {"--behaviour"}); }
TEST(Sharded, OptimizersOnTwoRanks) { ranks::expect_cells_pass(2, {"--optimizers"}); }
TEST(Sharded, OptimizersOnThreeRanks) { ranks::expect_cells_pass(3, {"--optimizers"}); }
TEST(Sharded, OptimizersOnFourRanks) { ranks::expect_cells_pass(4, {"--optimizers"}); }
TEST(Sharded, PrecisionOnOneRank) { ranks::expect_cells_pass(1, {"--precision"}); }
TEST(Sharded, PrecisionOnTwoRanks) { ranks::expect_cells_pass(2, {"--precision"}); }
TEST(Sharded, PrecisionOnThreeRanks) { ranks::expect_cells_pass(3, {"--precision"}); }
TEST(Sharded, OnGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const int num_ranks : {1, 2}) ranks::expect_cells_pass(num_ranks, {"--gpu"});
}
TEST(Sharded, ZeroPlusPlusOnTwoRanks) { ranks::expect_cells_pass(2, {"--zero-plus-plus"}); }
TEST(Sharded, ZeroPlusPlusOnFourRanks) { ranks::expect_cells_pass(4, {"--zero-plus-plus"}); }
TEST(Sharded, MemoryOnTwoRanks) { ranks::expect_cells_pass(2, {"--memory"}); }
TEST(Sharded, MemoryOnFourRanks) { ranks::expect_cells_pass(4, {"--memory"}); }
TEST(Sharded, ARankThatUsesMoreThanOthers) { ranks::expect_cells_pass(2, {"--one-rank-more"}); }
TEST(Sharded, RanksThatUseOtherUnits) { ranks::expect_cells_pass(3, {"--other-units"}); }
TEST(Sharded, ARankInAnotherCall) { ranks::expect_cells_pass(2, {"--other-call"}); }
TEST(Sharded, RanksInAnotherPass) { ranks::expect_cells_pass(2, {"--other-pass"}); }

}  // namespace
}  // namespace lockstep::shard
