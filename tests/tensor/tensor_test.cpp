#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep::nn {
namespace {

TEST(TensorParallel, OnOneRank) { ranks::expect_cells_pass(1, {"--all"}); }
TEST(TensorParallel, OnTwoRanks) { ranks::expect_cells_pass(2, {"--all"}); }
TEST(TensorParallel, OnThreeRanks) { ranks::expect_cells_pass(3, {"--all"}); }
TEST(TensorParallel, OnFourRanks) { ranks::expect_cells_pass(4, {"--all"}); }

TEST(PlainModules, OnOneRank) { ranks::expect_cells_pass(1, {"--plain"}); }
TEST(PlainModules, OnTwoRanks) { ranks::expect_cells_pass(2, {"--plain"}); }
TEST(PlainModules, OnFourRanks) { ranks::expect_cells_pass(4, {"--plain"}); }

}  // namespace
}  // namespace lockstep::nn
