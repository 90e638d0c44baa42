// The layout never changes the answer: every strategy is compared with one process, on models that
// nobody tuned it for. Each test launches one job of real processes, whose ranks run all cells.
#include <algorithm>

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/join.h>

#include <tests/ranks/job.h>

namespace lockstep::parity {
namespace {

class Parity : public ::testing::TestWithParam<int> {};

TEST_P(Parity, OfDataParallelism) { ranks::expect_cells_pass(GetParam(), {"--data-parallel"}); }
TEST_P(Parity, OfShards) { ranks::expect_cells_pass(GetParam(), {"--sharded"}); }

class ParityOfModels : public ::testing::TestWithParam<int> {};

TEST_P(ParityOfModels, OverAllAxes) { ranks::expect_cells_pass(GetParam(), {"--model-parallel"}); }

bool is_built(const std::string& backend) {
  const auto all = comm::available_backends();
  return std::ranges::find(all, backend) != all.end();
}

// With two ranks there is only one order of addition, whichever backend adds.
TEST(ParityOver, OfShardsTcp) {
  ranks::expect_cells_pass(2, {"--over", "tcp", "cpu", "--sharded"});
}

// Gloo's threads spin while they wait, and take the cores from ranks that compute.
TEST(ParityOver, OfShardsGloo) {
  if (!is_built("gloo")) GTEST_SKIP() << "this build has no gloo";
  ranks::expect_cells_pass(2, {"--over", "gloo", "cpu", "--sharded-few"});
}
TEST(WholeParityOverGloo, OfShards) {
  if (!is_built("gloo")) GTEST_SKIP() << "this build has no gloo";
  ranks::expect_cells_pass(2, {"--over", "gloo", "cpu", "--sharded"});
}

TEST(ParityOnGpu, OfShards) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const int num_ranks : {1, 2}) ranks::expect_cells_pass(num_ranks, {"--sharded-gpu"});
}

TEST(ParityOnGpu, OfModelsOverAllAxes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const int num_ranks : {2, 4})
    ranks::expect_cells_pass(num_ranks, {"--model-parallel-gpu"}, milliseconds(600'000));
}

TEST(WholeParityOnGpu, OfModelsOverAllAxes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const int num_ranks : {2, 4})
    ranks::expect_cells_pass(num_ranks, {"--model-parallel-gpu-whole"}, milliseconds(1'800'000));
}

// Ranks share a GPU; to NCCL each is a host of its own (ranks/gpu_sharing.h).
class ParityOverNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || !is_built("nccl")) GTEST_SKIP() << "needs a GPU and a build with NCCL";
  }

  static void expect_passes(int num_ranks, const std::string& table, const std::string& only = "") {
    ranks::expect_cells_pass(num_ranks, {"--over", "nccl", "cuda:0", table, only},
                             milliseconds(600'000));
  }
};

TEST_F(ParityOverNccl, OfShards) { expect_passes(2, "--sharded-gpu"); }

TEST_F(ParityOverNccl, OfModelsOverAllAxes) {
  for (const int num_ranks : {2, 4}) expect_passes(num_ranks, "--model-parallel-gpu");
}

TEST_F(ParityOverNccl, OfModelsOverThreeAxes) {
  for (const std::string layout :
       {"Llama, pp 2 replicate 1 shard 2 cp 1 tp 2, zb-h1, by positions, ZeRO-3, two passes",
        "GPT, pp 1 replicate 1 shard 2 cp 2 tp 2, all_to_all zigzag, ZeRO-2, two passes"})
    expect_passes(8, "--model-parallel-gpu-whole", layout);
}

// The cells that the Parity tests leave out.
class WholeParity : public ::testing::TestWithParam<int> {};

class WholeParityOfModels : public ::testing::TestWithParam<int> {};

TEST_P(WholeParityOfModels, OverAllAxes) {
  ranks::expect_cells_pass(GetParam(), {"--model-parallel-whole"}, milliseconds(1'800'000));
}

TEST_P(WholeParity, OfShards) { ranks::expect_cells_pass(GetParam(), {"--sharded-whole"}); }

INSTANTIATE_TEST_SUITE_P(Whole, WholeParity, ::testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param); });
INSTANTIATE_TEST_SUITE_P(Whole, WholeParityOfModels, ::testing::Values(2, 4, 8, 16),
                         [](const auto& info) { return std::to_string(info.param); });
INSTANTIATE_TEST_SUITE_P(Ranks, ParityOfModels, ::testing::Values(1, 2, 4, 8),
                         [](const auto& info) { return std::to_string(info.param); });
INSTANTIATE_TEST_SUITE_P(Ranks, Parity, ::testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace
}  // namespace lockstep::parity
