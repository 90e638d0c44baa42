#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <lockstep/nn/layers/norms.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>

#include "against_whole.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

constexpr std::int64_t kWidth = 8;
constexpr std::int64_t kLength = 24;

// Cut layers with other layers between them, each of which sees some of the positions.
struct SlicedBlock : torch::nn::Module {
  SlicedBlock()
      : tokens(register_module("tokens", VocabParallelEmbedding(13, kWidth))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        gate(register_module("gate", ColumnParallelLinear(kWidth, 24))),
        up(register_module("up", ColumnParallelLinear(kWidth, 24))),
        down(register_module("down", RowParallelLinear(24, kWidth))),
        plain(register_module("plain", torch::nn::Linear(kWidth, kWidth))),
        last(register_module("last", RMSNorm(kWidth, 1e-5))),
        scale(register_parameter("scale", at::ones({kWidth}))) {}

  at::Tensor forward(const at::Tensor& text) {
    const at::Tensor x = tokens(text);
    const auto both = linears(norm(x), {gate.get(), up.get()});
    const at::Tensor y = x + down(at::silu(both[0]) * both[1]);
    return last(y + at::tanh(plain(y)) * scale);
  }

  VocabParallelEmbedding tokens;
  torch::nn::LayerNorm norm;
  ColumnParallelLinear gate, up;
  RowParallelLinear down;
  torch::nn::Linear plain;
  RMSNorm last;
  at::Tensor scale;
};

void check_block(Cells& cells, const Precision& precision) {
  auto [whole, cut] = make_twins([] { return std::make_shared<SlicedBlock>(); }, precision.type,
                                 axis_of(cells, BetweenLayers::by_positions));
  const at::Tensor text = (at::arange(2 * kLength, at::kLong) * 5).remainder(13).view({2, kLength});
  torch::manual_seed(6);
  const at::Tensor gradient = at::randn({2, kLength, kWidth}, precision.type);
  // Runs two passes, because gradients accumulate.
  for (int pass = 0; pass < 2; ++pass) {
    const at::Tensor wanted = whole->forward(text), got = cut->forward(text);
    expect_within(cells, got, slice_of(wanted, cells), precision.tolerance, "the result");
    wanted.backward(gradient);
    got.backward(slice_of(gradient, cells));
  }
  expect_same_gradients(cells, *cut, *whole, precision.tolerance);
}

// Each rank has this parameter whole, and it is frozen while the layers are cut.
void check_thawed(Cells& cells) {
  const auto make = [] {
    auto block = std::make_shared<SlicedBlock>();
    block->last->weight.requires_grad_(false);
    block->down->bias.requires_grad_(false);
    return block;
  };
  const auto twins = make_twins(make, at::kDouble, axis_of(cells, BetweenLayers::by_positions));
  const auto& whole = twins.whole;
  const auto& cut = twins.cut;
  const at::Tensor text = at::arange(kLength, at::kLong).remainder(13).view({1, kLength});
  const auto pass = [&] {
    whole->forward(text).sum().backward();
    cut->forward(text).sum().backward();
    expect_same_gradients(cells, *cut, *whole, 1e-10);
  };
  pass();
  cells.expect(!cut->last->weight.grad().defined(), "a frozen weight has a gradient");
  for (auto* block : {whole.get(), cut.get()}) {
    block->last->weight.requires_grad_(true);
    block->down->bias.requires_grad_(true);
  }
  pass();
}

void check_mistakes(Cells& cells) {
  const auto axis = axis_of(cells, BetweenLayers::by_positions);
  const int ranks = cells.num_ranks();
  const auto make_cut = [&] {
    auto block = std::make_shared<SlicedBlock>();
    cut_parallel_layers(*block, axis);
    return block;
  };
  cells.cell("a length that cannot be sliced", [&] {
    const auto block = make_cut();
    cells.expect_usage_error(
        [&] {
          block->forward(at::zeros({1, 13}, at::kLong));
        },
        fmt::format("13 is no multiple of {}", ranks));
  });
  cells.cell("rows without positions", [&] {
    const auto block = make_cut();
    cells.expect_usage_error([&] { block->gate(at::zeros({12, kWidth})); }, "[12, 8]");
    cells.expect_usage_error(
        [&] {
          block->down(at::zeros({12, 24 / ranks}));
        },
        "give [batch, length");
    cells.expect_usage_error([&] { block->tokens(at::zeros({12}, at::kLong)); },
                             "give [batch, length");
  });
  cells.cell("whole features between sliced layers", [&] {
    ColumnParallelLinear column(kWidth, 24, ColumnParallelLinearOptions{.gather_output = true});
    RowParallelLinear row(24, kWidth, RowParallelLinearOptions{.input_is_parallel = false});
    cells.expect_usage_error([&] { cut_parallel_layers(*column, axis); }, "gathers its outputs");
    cells.expect_usage_error([&] { cut_parallel_layers(*row, axis); }, "takes its part of whole");
  });
  cells.cell("a second plan for slices", [&] {
    const auto block = std::make_shared<SlicedBlock>();
    apply_plan(*block, {{"gate", {.kind = CutKind::column}}}, axis);
    cells.expect_usage_error(
        [&] {
          apply_plan(*block, {{"up", {.kind = CutKind::column}}}, axis);
        },
        "one plan names all of them");
    cells.expect(block->up->axis() == nullptr, "it is cut all the same");
  });
}

}  // namespace

void check_slices_of_positions(Cells& cells) {
  for (const Precision& precision : kPrecisions)
    cells.cell(fmt::format("slices of positions, {}", c10::toString(precision.type)),
               [&] { check_block(cells, precision); });
  cells.cell("parameters that are thawed", [&] { check_thawed(cells); });
  if (cells.num_ranks() > 1) check_mistakes(cells);
}

}  // namespace lockstep::nn
