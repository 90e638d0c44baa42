#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep::pipeline {
namespace {

TEST(SplitDataParallel, OnTwoRanks) { ranks::expect_cells_pass(2, {"--data-parallel"}); }

}  // namespace
}  // namespace lockstep::pipeline
