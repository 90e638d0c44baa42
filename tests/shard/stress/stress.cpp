// A thousand steps on ranks that are never in step, with memory that comes and goes. The result is,
// to the bit, that of undisturbed ranks. With --rank the program is one rank.
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include <tests/ranks/job.h>
#include <tests/shard/chain.h>

namespace lockstep::shard {
namespace {

using ranks::Cells;

constexpr int kSteps = 1000;

// Delays a rank, each in a different way.
class Disturbance {
 public:
  explicit Disturbance(int rank) : random_(static_cast<std::uint32_t>(rank)) {}

  void operator()() {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
    // Allocates memory, so that freed memory belongs to others when it is needed again.
    kept_[random_() % kept_.size()] = at::full({1 + static_cast<std::int64_t>(random_() % 20'000)},
                                               std::numeric_limits<float>::quiet_NaN());
  }

 private:
  std::minstd_rand random_;
  std::array<at::Tensor, 8> kept_;
};

std::vector<NamedTensor> train(const Cells& cells, const Options& options,
                               const std::function<void()>& disturb) {
  torch::manual_seed(1);
  Chain model(5, 9);
  FullyShardedDataParallel parallel = sharded(cells, *model, options);
  const auto optimizer = adamw(parallel, *model);
  for (int step = 0; step < kSteps; ++step) {
    torch::manual_seed(static_cast<std::uint64_t>(10 * step + cells.rank()));
    optimizer->zero_grad();
    const at::Tensor input = at::randn({3, 9});
    disturb();
    const at::Tensor loss = model->forward(input).pow(2).sum();
    disturb();
    if (step % 3 == 0) {
      const auto guard = parallel.no_sync();
      parallel.backward(model->forward(input * 2).pow(2).sum(), 3);
    }
    parallel.backward(loss, 3);
    disturb();
    if (step % 2 == 0) parallel.clip_gradients(0.5);
    optimizer->step(0.001);
  }
  return parallel.full_state_dict({.rank0_only = false});
}

void check_stress(Cells& cells) {
  for (const auto& [name, options] : std::vector<std::pair<std::string, Options>>{
           {"FULL_SHARD, one unit at a time", {.max_live_units = 1}},
           {"FULL_SHARD", {}},
           {"SHARD_GRAD_OP", {.cut = Cut::gradients}}})
    cells.cell(name, [&] {
      const auto calm = train(cells, options, [] {});
      Disturbance disturbance(cells.rank());
      const auto disturbed = train(cells, options, disturbance);
      for (std::size_t index = 0; index < calm.size(); ++index) {
        cells.expect(calm[index].tensor.isfinite().all().item<bool>(), calm[index].name);
        cells.expect_same(disturbed[index].tensor, calm[index].tensor, calm[index].name);
      }
    });
}

TEST(ShardStress, OnTwoRanks) { ranks::expect_cells_pass(2, {"--rank"}); }
TEST(ShardStress, OnThreeRanks) { ranks::expect_cells_pass(3, {"--rank"}); }

}  // namespace
}  // namespace lockstep::shard

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--rank") == 0)
    return lockstep::ranks::run_cells(lockstep::shard::check_stress);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
