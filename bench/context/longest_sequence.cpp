// Finds the longest sequence that fits into a given memory on each rank: its forward and backward
// through ContextParallelAttention (width 512, 8 heads, float32) take no more than the budget,
// inputs included, as LibTorch's allocator counts. If memory is linear in a rank's part, the length
// is proportional to the number of ranks.
//
//   lockstep run --standalone --nproc-per-node 4 build/release/bench/context_longest_sequence
//       [MiB…]
//
// The groups of 1, 2, 4, … ranks are made of the first ranks of the job.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include <lockstep/comm/world/join.h>
#include <lockstep/device/live_bytes.h>
#include <lockstep/nn/context_parallel/context_parallel_attention.h>

namespace {

using namespace lockstep;

constexpr std::int64_t kWidth = 512;
constexpr std::int64_t kHeads = 8;
// Lengths are multiples of this many positions of a rank.
constexpr std::int64_t kGrain = 32;

// The most bytes that any rank of the group has in use at once.
std::int64_t peak_bytes(nn::ContextParallelAttention& attention, comm::Communicator& group,
                        std::int64_t length_of_rank) {
  const device::LiveBytes memory(at::kCPU);
  {
    const at::Tensor x = at::randn({1, length_of_rank, kWidth}).requires_grad_();
    attention->forward(x).sum().backward();
  }
  attention->zero_grad();
  at::Tensor peak = at::scalar_tensor(static_cast<std::int64_t>(memory.peak()), at::kLong);
  group.all_reduce(peak, comm::ReduceOp::max).wait();
  return peak.item<std::int64_t>();
}

// The longest sequence, as positions of one rank.
std::int64_t longest(nn::ContextParallelAttention& attention, comm::Communicator& group,
                     std::int64_t budget) {
  std::int64_t fits = 0;
  std::int64_t too_long = kGrain;
  while (peak_bytes(attention, group, too_long) <= budget) {
    fits = too_long;
    too_long *= 2;
  }
  while (too_long - fits > kGrain) {
    const std::int64_t middle = (fits + too_long) / 2 / kGrain * kGrain;
    (peak_bytes(attention, group, middle) <= budget ? fits : too_long) = middle;
  }
  return fits;
}

}  // namespace

int main(int argc, char** argv) {
  const auto world = comm::join_world();
  at::set_num_threads(1);
  std::vector<std::int64_t> budgets;
  for (int i = 1; i < argc; ++i) budgets.push_back(std::atoll(argv[i]));
  if (budgets.empty()) budgets = {16, 32};
  if (world->rank() == 0)
    std::printf("%12s %6s %10s %14s\n", "MiB a rank", "ranks", "positions", "of one rank's");
  for (const std::int64_t budget : budgets) {
    std::int64_t alone = 0;
    for (int size = 1; size <= world->size(); size *= 2) {
      const auto group = world->split(world->rank() < size ? 0 : 1, 0, "cp");
      if (world->rank() < size) {
        torch::manual_seed(1);
        nn::ContextParallelAttention attention(kWidth, kHeads, group);
        const std::int64_t positions = longest(attention, *group, budget << 20) * size;
        if (size == 1) alone = positions;
        if (world->rank() == 0)
          std::printf("%12lld %6d %10lld %14.2f\n", static_cast<long long>(budget), size,
                      static_cast<long long>(positions),
                      static_cast<double>(positions) / static_cast<double>(alone));
      }
      world->barrier().wait();
    }
  }
  return 0;
}
