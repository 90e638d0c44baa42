#include "against_whole.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

void check_row(Cells& cells, const RowParallelLinearOptions& options,
               std::vector<std::int64_t> batch, const Precision& precision) {
  auto [whole, cut] = make_twins([&] { return RowParallelLinear(24, 10, options); }, precision.type,
                                 axis_of(cells));
  torch::manual_seed(5);
  batch.push_back(24);
  const at::Tensor x = at::randn(batch, precision.type);
  batch.back() = 10;
  const at::Tensor gradient = at::randn(batch, precision.type);
  const auto part = mesh::part_of(24, cells.rank(), cells.num_ranks());
  const auto mine = [&](const at::Tensor& all) {
    return options.input_is_parallel ? all.narrow(-1, part.begin, part.size()) : all;
  };
  const at::Tensor of_whole = leaf(x), of_cut = leaf(mine(x));
  const at::Tensor wanted = whole->forward(of_whole), got = cut->forward(of_cut);
  expect_within(cells, got, wanted, precision.tolerance, "the result");
  wanted.backward(gradient);
  got.backward(gradient);
  expect_within(cells, of_cut.grad(), mine(of_whole.grad()), precision.tolerance,
                "the input's gradient");
  expect_same_gradients(cells, *cut, *whole, precision.tolerance);
}

// The gradient of a gradient that all ranks have: of |d loss / d x|², by weight and by x.
void check_second_derivative(Cells& cells) {
  auto [whole, cut] = make_twins(
      [] { return RowParallelLinear(12, 6, RowParallelLinearOptions{.input_is_parallel = false}); },
      at::kDouble, axis_of(cells));
  torch::manual_seed(8);
  const at::Tensor x = at::randn({4, 12}, at::kDouble);
  const auto penalty = [&](RowParallelLinear& layer, const at::Tensor& in) {
    const at::Tensor loss = layer->forward(in).pow(3).sum();
    return torch::autograd::grad({loss}, {in}, {}, true, /*create_graph=*/true)[0].pow(2).sum();
  };
  const at::Tensor of_whole = leaf(x), of_cut = leaf(x);
  penalty(whole, of_whole).backward();
  penalty(cut, of_cut).backward();
  expect_within(cells, of_cut.grad(), of_whole.grad(), 1e-10, "the input's");
  expect_same_gradients(cells, *cut, *whole, 1e-10);
}

}  // namespace

void check_row_layers(Cells& cells) {
  for (const Precision& precision : kPrecisions)
    for (const bool parallel : {true, false})
      for (const Bias bias : {Bias::added, Bias::none})
        for (const auto& batch : std::vector<std::vector<std::int64_t>>{{2, 5}, {7}})
          cells.cell(fmt::format("row of {} inputs, {} bias, {} dims, {}",
                                 parallel ? "cut" : "whole", bias == Bias::added ? "with" : "no",
                                 batch.size() + 1, c10::toString(precision.type)),
                     [&] {
                       check_row(cells, {.bias = bias, .input_is_parallel = parallel}, batch,
                                 precision);
                     });
  cells.cell("second derivatives of a row", [&] { check_second_derivative(cells); });
}

}  // namespace lockstep::nn
