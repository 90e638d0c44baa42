// Compares context-parallel attention with attention() on the whole sequence, which every rank
// computes for itself in float64.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include <lockstep/nn/context_parallel/context_parallel.h>
#include <lockstep/nn/layers/attention.h>

#include "tables.h"

namespace lockstep::nn {

struct AttentionCase {
  std::int64_t batch = 1;
  std::int64_t heads = 12;
  std::int64_t kv_heads = 12;
  std::int64_t length = 24;
  std::int64_t head_dim = 8;
};

// The memory layout of the tensors.
enum class Layout { by_head, by_position };

inline SequencePart part_of_rank(const ranks::Cells& cells, SplitKind kind) {
  return {.rank = cells.rank(), .size = cells.num_ranks(), .kind = kind};
}

// The largest error, relative to the largest value.
inline void expect_within(ranks::Cells& cells, const at::Tensor& got, const at::Tensor& wanted,
                          double tolerance, const std::string& what) {
  if (!got.defined() || got.sizes() != wanted.sizes())
    return cells.expect(false, what + " has another shape");
  const auto right = wanted.to(at::kCPU, at::kDouble);
  const auto here = got.detach().to(at::kCPU, at::kDouble);
  const double error = (here - right).abs().max().item<double>() /
                       std::max(1e-300, right.abs().max().item<double>());
  cells.expect(error <= tolerance, fmt::format("{} is off by {:.3g}", what, error));
}

inline void check_against_whole(ranks::Cells& cells, const AttentionCase& shape,
                                const ContextParallelOptions& options,
                                const at::TensorOptions& kind, double tolerance,
                                Layout layout = Layout::by_head) {
  torch::manual_seed(7);
  const auto draw = [&](std::int64_t heads) {
    // Values are rounded to the type first, so that both sides compute on the same numbers.
    return at::randn({shape.batch, heads, shape.length, shape.head_dim})
        .to(c10::typeMetaToScalarType(kind.dtype()))
        .to(at::kDouble);
  };
  std::vector<at::Tensor> whole{draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads)};
  const auto grad = draw(shape.heads);
  std::vector<at::Tensor> mine;
  const auto part = part_of_rank(cells, options.split);
  for (auto& tensor : whole) {
    auto of_rank = take_part(tensor, 2, part).to(kind);
    if (layout == Layout::by_position)
      of_rank = of_rank.transpose(1, 2).contiguous().transpose(1, 2);
    mine.push_back(of_rank.detach().requires_grad_());
    tensor.requires_grad_();
  }
  const auto expected =
      attention(whole[0], whole[1], whole[2], {.causal = options.causal, .scale = options.scale});
  const auto wanted = torch::autograd::grad({expected}, whole, {grad});
  const auto output = context_parallel_attention(mine[0], mine[1], mine[2], cells.group(), options);
  const auto found = torch::autograd::grad({output}, mine, {take_part(grad, 2, part).to(kind)});
  cells.expect(output.scalar_type() == c10::typeMetaToScalarType(kind.dtype()), "another type");
  cells.expect(output.transpose(1, 2).is_contiguous(), "the result does not lie by position");
  expect_within(cells, output, take_part(expected.detach(), 2, part), tolerance, "the result");
  const char* names[] = {"dq", "dk", "dv"};
  for (std::size_t i = 0; i < 3; ++i)
    expect_within(cells, found[i], take_part(wanted[i], 2, part), tolerance, names[i]);
}

}  // namespace lockstep::nn
