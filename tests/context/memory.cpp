#include <lockstep/device/live_bytes.h>
#include <lockstep/nn/context_parallel/context_parallel_attention.h>

#include "against_whole.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

constexpr double kAtMost = 0.3;

// The most memory that forward and backward take besides their inputs.
template <typename Forward>
double peak_of(const std::vector<at::Tensor>& inputs, const at::Tensor& grad,
               const Forward& forward) {
  std::vector<at::Tensor> leaves;
  for (const auto& input : inputs) leaves.push_back(input.detach().requires_grad_());
  const device::LiveBytes memory(at::kCPU);
  torch::autograd::grad({forward(leaves)}, leaves, {grad});
  return static_cast<double>(memory.peak());
}

void expect_small(Cells& cells, double split, double whole) {
  cells.expect(split <= kAtMost * whole,
               fmt::format("{:.0f} bytes on {} ranks, {:.0f} on one: {:.3f} times as many", split,
                           cells.num_ranks(), whole, split / whole));
}

}  // namespace

void check_context_memory(Cells& cells) {
  const auto alone = cells.group()->split(cells.rank(), 0, "alone");
  const auto part = part_of_rank(cells, SplitKind::zigzag);
  for (const auto algorithm : {ContextAlgorithm::ring, ContextAlgorithm::all_to_all})
    cells.cell(fmt::format("memory of the module, {}", name(algorithm)), [&] {
      const std::int64_t length = 2048, width = 512;
      const ContextParallelAttentionOptions options{.algorithm = algorithm};
      ContextParallelAttention whole(width, 8, alone, options);
      ContextParallelAttention split(width, 8, cells.group(), options);
      const auto x = at::randn({1, length, width});
      const auto one = peak_of({x}, x, [&](const auto& in) { return whole->forward(in[0]); });
      const auto mine = take_part(x, 1, part);
      const auto four =
          peak_of({mine}, mine, [&](const auto& in) { return split->forward(in[0]); });
      expect_small(cells, four, one);
    });
  cells.cell("memory of attention alone, ring", [&] {
    const auto x = at::randn({2, 8, 2048, 64});
    const auto attend = [&](const auto& group) {
      return [&](const std::vector<at::Tensor>& in) {
        return context_parallel_attention(in[0], in[1], in[2], group);
      };
    };
    const auto one = peak_of({x, x, x}, x, attend(alone));
    const auto mine = take_part(x, 2, part);
    expect_small(cells, peak_of({mine, mine, mine}, mine, attend(cells.group())), one);
  });
}

}  // namespace lockstep::nn
