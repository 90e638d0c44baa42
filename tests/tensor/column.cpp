#include <torch/nn/modules/linear.h>

#include "against_whole.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

struct ColumnCase {
  std::string name;
  std::int64_t out = 36;
  ColumnParallelLinearOptions options;
  std::vector<std::int64_t> batch = {2, 5};
};

std::vector<ColumnCase> column_cases(int num_ranks) {
  std::vector<ColumnCase> cases;
  for (const bool gathered : {false, true}) {
    const std::string suffix = gathered ? ", gathered" : "";
    cases.push_back({"column" + suffix, 36, {.gather_output = gathered}});
    cases.push_back(
        {"column without bias" + suffix, 36, {.bias = Bias::none, .gather_output = gathered}});
    cases.push_back({"column of rows" + suffix, 36, {.gather_output = gathered}, {7}});
    cases.push_back({"three blocks" + suffix, 72, {.gather_output = gathered, .blocks = 3}});
    cases.push_back({"three blocks of heads" + suffix,
                     72,
                     {.gather_output = gathered, .blocks = 3, .unit = 2}});
    cases.push_back(
        {"a head that all have" + suffix, 6, {.gather_output = gathered, .unit = 6}, {2, 3}});
    cases.push_back(
        {"three blocks of it" + suffix, 18, {.gather_output = gathered, .blocks = 3, .unit = 6}});
    if (num_ranks != 3)
      cases.push_back({"two heads" + suffix, 12, {.gather_output = gathered, .unit = 6}});
  }
  return cases;
}

// The outputs of rank `rank`: [..., blocks, width].
at::Tensor part_of_outputs(const at::Tensor& y, const ColumnCase& one, int rank, int num_ranks) {
  const std::int64_t per_block = one.out / one.options.blocks;
  const std::int64_t parts = std::min<std::int64_t>(num_ranks, per_block / one.options.unit);
  const std::int64_t part = rank * parts / num_ranks, width = per_block / parts;
  return y.unflatten(-1, {one.options.blocks, per_block}).narrow(-1, part * width, width);
}

void check_column(Cells& cells, const ColumnCase& one, const Precision& precision) {
  auto [whole, cut] = make_twins([&] { return ColumnParallelLinear(8, one.out, one.options); },
                                 precision.type, axis_of(cells));
  torch::manual_seed(5);
  auto shape = one.batch;
  shape.push_back(8);
  const at::Tensor x = at::randn(shape, precision.type);
  shape.back() = one.out;
  const at::Tensor of_whole = leaf(x), of_cut = leaf(x);
  const at::Tensor wanted = whole->forward(of_whole), got = cut->forward(of_cut);
  if (one.options.gather_output) {
    expect_within(cells, got, wanted, precision.tolerance, "the result");
    const at::Tensor gradient = at::randn(shape, precision.type);
    wanted.backward(gradient);
    got.backward(gradient);
  } else {
    const auto mine = part_of_outputs(wanted, one, cells.rank(), cells.num_ranks()).flatten(-2);
    expect_within(cells, got, mine, precision.tolerance, "the result");
    // If several ranks have the same outputs, each uses them with a gradient of its own.
    const at::Tensor gradient = at::zeros(shape, precision.type);
    at::Tensor gradient_here;
    for (int rank = 0; rank < cells.num_ranks(); ++rank) {
      const at::Tensor to = part_of_outputs(gradient, one, rank, cells.num_ranks());
      const at::Tensor drawn = at::randn(to.sizes(), precision.type);
      to.add_(drawn);
      if (rank == cells.rank()) gradient_here = drawn.flatten(-2);
    }
    wanted.backward(gradient);
    got.backward(gradient_here);
  }
  expect_within(cells, of_cut.grad(), of_whole.grad(), precision.tolerance, "the input's gradient");
  expect_same_gradients(cells, *cut, *whole, precision.tolerance);
}

struct ThreeColumns : torch::nn::Module {
  ThreeColumns()
      : a(register_module("a", ColumnParallelLinear(8, 12))),
        b(register_module(
            "b", ColumnParallelLinear(8, 24, ColumnParallelLinearOptions{.bias = Bias::none}))),
        c(register_module("c", ColumnParallelLinear(8, 36))) {}

  ColumnParallelLinear a, b, c;
};

void check_linears(Cells& cells, const Precision& precision) {
  auto [whole, cut] =
      make_twins([] { return std::make_shared<ThreeColumns>(); }, precision.type, axis_of(cells));
  torch::manual_seed(6);
  const at::Tensor x = at::randn({2, 4, 8}, precision.type);
  const at::Tensor one_by_one = leaf(x), together = leaf(x), of_whole = leaf(x);
  const auto run = [](ThreeColumns& module, const at::Tensor& in) {
    return linears(in, {module.a.get(), module.b.get(), module.c.get()});
  };
  const auto wanted = run(*whole, of_whole), got = run(*cut, together);
  const std::vector<at::Tensor> single{cut->a(one_by_one), cut->b(one_by_one), cut->c(one_by_one)};
  at::Tensor whole_loss, loss;
  for (std::size_t i = 0; i < 3; ++i) {
    cells.expect_same(got[i], single[i], fmt::format("of several, result {}", i));
    const at::Tensor weights = at::randn(wanted[i].sizes(), precision.type);
    const auto part = mesh::part_of(weights.size(-1), cells.rank(), cells.num_ranks());
    // The second result is multiplied by 0.
    const double factor = i == 1 ? 0.0 : 1.0;
    const auto add = [&](at::Tensor& sum, const at::Tensor& term) {
      sum = sum.defined() ? sum + factor * term : factor * term;
    };
    add(whole_loss, (wanted[i] * weights).sum());
    add(loss, (got[i] * weights.narrow(-1, part.begin, part.size())).sum());
  }
  whole_loss.backward();
  loss.backward();
  expect_within(cells, together.grad(), of_whole.grad(), precision.tolerance,
                "the input's gradient");
  expect_same_gradients(cells, *cut, *whole, precision.tolerance);
  // Only one of the results is used in the loss.
  cut->zero_grad();
  whole->zero_grad();
  run(*whole, x)[2].sum().backward();
  run(*cut, x)[2].sum().backward();
  expect_within(
      cells, cut->c->bias.grad(),
      mesh::part_of(whole->c->bias.grad(), cut->c->cut_parameters()[1].placement).flatten(),
      precision.tolerance, "the only bias's gradient");
}

}  // namespace

void check_column_layers(Cells& cells) {
  for (const Precision& precision : kPrecisions) {
    const char* const type = c10::toString(precision.type);
    for (const ColumnCase& one : column_cases(cells.num_ranks()))
      cells.cell(fmt::format("{}, {}", one.name, type),
                 [&] { check_column(cells, one, precision); });
    cells.cell(fmt::format("several columns of one input, {}", type),
               [&] { check_linears(cells, precision); });
  }
  cells.cell("weights are drawn as torch::nn::Linear's", [&] {
    torch::manual_seed(9);
    const ColumnParallelLinear layer(8, 12);
    torch::manual_seed(9);
    const torch::nn::Linear plain(8, 12);
    cells.expect_same(layer->weight, plain->weight, "the weight");
    cells.expect_same(layer->bias, plain->bias, "the bias");
  });
}

}  // namespace lockstep::nn
