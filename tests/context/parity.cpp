#include "against_whole.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

constexpr double kDouble = 1e-10;
constexpr double kFloat = 1e-5;

std::string title(const AttentionCase& shape, const ContextParallelOptions& options) {
  return fmt::format("{} {}{} batch {} heads {}/{} length {} head_dim {}", name(options.algorithm),
                     name(options.split), options.causal ? " causal" : "", shape.batch, shape.heads,
                     shape.kv_heads, shape.length, shape.head_dim);
}

void check_both_types(Cells& cells, const AttentionCase& shape,
                      const ContextParallelOptions& options) {
  cells.cell(title(shape, options) + " float64", [&] {
    check_against_whole(cells, shape, options, at::TensorOptions(at::kDouble), kDouble);
  });
  cells.cell(title(shape, options) + " float32", [&] {
    check_against_whole(cells, shape, options, at::TensorOptions(at::kFloat), kFloat);
  });
}

}  // namespace

void check_parity(Cells& cells) {
  // The heads of keys are a multiple of the ranks, a divisor of them, or neither.
  const std::vector<AttentionCase> shapes = {
      {},
      {.batch = 3, .kv_heads = 4, .length = 48, .head_dim = 5},
      {.batch = 2, .kv_heads = 6, .head_dim = 1},
      {.kv_heads = 1, .length = 120, .head_dim = 33},
  };
  const AttentionCase of_no_divisor{
      .batch = 2, .heads = 5, .kv_heads = 5, .length = 24, .head_dim = 7};
  // Large enough to travel around the ring in several pieces, of heads and samples.
  const AttentionCase large{.batch = 3, .heads = 4, .kv_heads = 2, .length = 768, .head_dim = 64};
  for (const auto split : {SplitKind::contiguous, SplitKind::zigzag})
    for (const bool causal : {true, false}) {
      for (const auto algorithm : {ContextAlgorithm::ring, ContextAlgorithm::all_to_all})
        for (const auto& shape : shapes)
          check_both_types(cells, shape,
                           {.causal = causal, .algorithm = algorithm, .split = split});
      check_both_types(cells, of_no_divisor, {.causal = causal, .split = split});
      if (causal) check_both_types(cells, large, {.split = split});
    }
  for (const auto algorithm : {ContextAlgorithm::ring, ContextAlgorithm::all_to_all}) {
    const ContextParallelOptions scaled{.scale = -0.7, .algorithm = algorithm};
    check_both_types(cells, {.batch = 2, .kv_heads = 4}, scaled);
    cells.cell(fmt::format("{} of tensors by position", name(algorithm)), [&] {
      check_against_whole(cells, {.batch = 2, .kv_heads = 4}, scaled, at::TensorOptions(at::kFloat),
                          kFloat, Layout::by_position);
    });
    cells.cell(fmt::format("{} of an empty batch", name(algorithm)), [&] {
      const auto x = at::randn({0, 12, 4, 8}).requires_grad_();
      const auto y = context_parallel_attention(x, x, x, cells.group(), {.algorithm = algorithm});
      cells.expect(y.sizes() == x.sizes(), "another shape");
      y.sum().backward();
    });
  }
  // On a CPU attention() itself may lack such products.
  if (cells.num_ranks() > 1)
    cells.cell("ring in bfloat16", [&] {
      check_against_whole(cells, {.batch = 2, .kv_heads = 4}, {}, at::TensorOptions(at::kBFloat16),
                          0.02);
    });
}

}  // namespace lockstep::nn
