#include <gtest/gtest.h>

#include <tests/ranks/job.h>

namespace lockstep::replicate {
namespace {

TEST(SyncBatchNorm, IsThatOfTheWholeBatch) { ranks::expect_cells_pass(3, {"--rank"}); }

TEST(SyncBatchNorm, RefusesADispatchKeyThatIsTaken) { ranks::expect_cells_pass(1, {"--key"}); }

}  // namespace
}  // namespace lockstep::replicate
