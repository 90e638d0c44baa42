#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep {
namespace {

TEST(DistributedManager, OnTwoRanks) { ranks::expect_cells_pass(2, {"--rank"}); }
TEST(DistributedManager, OfModelsThatAreCut) { ranks::expect_cells_pass(2, {"--sharded"}); }
TEST(DistributedManager, MeansTheSameWithEveryStrategy) {
  ranks::expect_cells_pass(2, {"--every-strategy"});
}
TEST(DistributedManager, UnscalesGradientsWithEveryStrategy) {
  for (const char* strategy : {"NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD"}) {
    SCOPED_TRACE(strategy);
    ranks::expect_cells_pass(2, {"--scaled", strategy});
  }
}
TEST(DistributedManager, OfLayersThatRanksShare) {
  for (const int num_ranks : {2, 4}) ranks::expect_cells_pass(num_ranks, {"--tensor"});
}
TEST(DistributedManager, OfPlainLayersThatAPlanCuts) {
  for (const int num_ranks : {2, 4}) ranks::expect_cells_pass(num_ranks, {"--plain-tensor"});
}
TEST(DistributedManager, OfStagesOfAPipeline) { ranks::expect_cells_pass(2, {"--stages"}); }
TEST(DistributedManager, FindsRanksThatWaitForEachOtherInDifferentGroups) {
  for (const int num_ranks : {2, 3}) ranks::expect_cells_pass(num_ranks, {"--waits"});
}
TEST(DistributedManager, OnOneRank) { ranks::expect_cells_pass(1, {"--rank"}); }

}  // namespace
}  // namespace lockstep
