#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep::pipeline {
namespace {

TEST(Executor, SchedulesOnTwoRanks) { ranks::expect_cells_pass(2, {"--schedules"}); }
TEST(Executor, SchedulesOnFourRanks) { ranks::expect_cells_pass(4, {"--schedules"}); }
TEST(Executor, BehaviourOnTwoRanks) { ranks::expect_cells_pass(2, {"--behaviour"}); }
TEST(Executor, BehaviourOnFourRanks) { ranks::expect_cells_pass(4, {"--behaviour"}); }
TEST(Pipes, OnTwoRanks) { ranks::expect_cells_pass(2, {"--pipes"}); }
TEST(Pipes, OnFourRanks) { ranks::expect_cells_pass(4, {"--pipes"}); }
TEST(Listed, OnTwoRanks) { ranks::expect_cells_pass(2, {"--listed"}); }
TEST(Listed, OnFourRanks) { ranks::expect_cells_pass(4, {"--listed"}); }

}  // namespace
}  // namespace lockstep::pipeline
