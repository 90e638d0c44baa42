#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep::replicate {
namespace {

TEST(DataParallel, Behaviour) { ranks::expect_cells_pass(3, {"--rank"}); }

TEST(DataParallel, RefusesUnusedParametersOnEveryRank) {
  ranks::expect_cells_pass(2, {"--unused"});
}

}  // namespace
}  // namespace lockstep::replicate
