#include <torch/nn/modules/linear.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>

#include "parallel_mlp.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

struct Mixed : torch::nn::Module {
  Mixed()
      : first(register_module("first", Linear(8, 12, Bias::added))),
        second(register_module("second", Linear(12, 8, Bias::added))),
        embedding(register_module("embedding", Embedding(13, 8))),
        plain(register_module("plain", torch::nn::Linear(8, 8))) {}

  Linear first, second;
  Embedding embedding;
  torch::nn::Linear plain;
};

struct TiedLinear : LinearImpl {
  explicit TiedLinear(const at::Tensor& shared)
      : LinearImpl(shared.size(1), shared.size(0), Bias::none) {
    weight = parameters_["weight"] = shared;
  }
};

void check_sizes(Cells& cells) {
  const auto axis = axis_of(cells);
  const int ranks = cells.num_ranks();
  const auto cut = [&](auto layer) { return [=]() mutable { cut_parallel_layers(*layer, axis); }; };
  cells.cell("outputs that do not divide", [&] {
    ColumnParallelLinear layer(8, 12 * ranks + 1);
    cells.expect_usage_error(cut(layer), fmt::format("the {} outputs", 12 * ranks + 1));
    cells.expect(layer->axis() == nullptr && layer->weight.size(0) == 12 * ranks + 1,
                 "it is cut all the same");
    layer->forward(at::zeros({2, 8}));
  });
  cells.cell("heads that do not divide", [&] {
    cells.expect_usage_error(
        cut(ColumnParallelLinear(8, 5 * 6, ColumnParallelLinearOptions{.unit = 6})),
        "1 blocks of 5 units of 6");
    cells.expect_usage_error(
        cut(ColumnParallelLinear(8, 3 * 5 * 2,
                                 ColumnParallelLinearOptions{.blocks = 3, .unit = 2})),
        "3 blocks of 5 units of 2");
  });
  cells.cell("no blocks, no units", [&] {
    cells.expect_usage_error(
        cut(ColumnParallelLinear(8, 12, ColumnParallelLinearOptions{.blocks = 0})),
        "0 blocks of units of 1");
    cells.expect_usage_error(
        cut(ColumnParallelLinear(8, 12, ColumnParallelLinearOptions{.unit = -2})), "units of -2");
    cells.expect_usage_error(
        cut(ColumnParallelLinear(8, 12, ColumnParallelLinearOptions{.unit = 24})), "0 units of 24");
  });
  cells.cell("inputs that do not divide", [&] {
    cells.expect_usage_error(cut(RowParallelLinear(5, 8)), fmt::format("no multiple of {}", ranks));
    RowParallelLinear layer(12, 8, RowParallelLinearOptions{.input_is_parallel = false});
    cut_parallel_layers(*layer, axis);
    cells.expect_usage_error(
        [&] {
          layer->forward(at::zeros({2, 5}));
        },
        fmt::format("5 is no multiple of {}", ranks));
  });
  cells.cell("fewer rows than ranks",
             [&] { cells.expect_usage_error(cut(VocabParallelEmbedding(1, 8)), "has 1 rows"); });
  cells.cell("rows of another part", [&] {
    const auto part = mesh::part_of(13, cells.rank(), ranks);
    cells.expect_usage_error(
        [&] {
          vocab_parallel_cross_entropy(at::zeros({2, 8}), at::zeros({part.size() + 1, 8}),
                                       at::zeros({2}, at::kLong),
                                       {.begin = part.begin, .vocabulary = 13}, axis);
        },
        fmt::format("its part is {} from {} on", part.size(), part.begin));
  });
  cells.cell("a target outside the vocabulary", [&] {
    const auto part = mesh::part_of(13, cells.rank(), ranks);
    cells.expect_usage_error(
        [&] {
          vocab_parallel_cross_entropy(at::zeros({2, 8}), at::zeros({part.size(), 8}),
                                       at::full({2}, 13, at::kLong),
                                       {.begin = part.begin, .vocabulary = 13}, axis);
        },
        "13");
  });
}

void check_plans(Cells& cells) {
  const auto axis = axis_of(cells);
  const PlannedCut column{"first", {.kind = CutKind::column}};
  const auto apply = [&](Mixed& model, const TensorPlan& plan) {
    return [&model, plan, axis] { apply_plan(model, plan, axis); };
  };
  const auto refused_of = [&](Mixed& model, const TensorPlan& plan, const std::string& part) {
    cells.expect_usage_error(apply(model, plan), part);
    cells.expect(cut_parameters(model).empty() && model.first->axis() == nullptr,
                 "something is cut all the same");
  };
  const auto refused = [&](const TensorPlan& plan, const std::string& part) {
    Mixed model;
    refused_of(model, plan, part);
  };
  cells.cell("a pattern that nothing matches", [&] {
    refused({column, {"third", {}}}, "is called 'third'");
    refused({column, {"*.first", {}}}, "is called '*.first'");
  });
  cells.cell("a layer that two patterns match", [&] {
    refused({column, {"f*", {}}}, "'first' is cut by 'first' and by 'f*'");
  });
  cells.cell("a layer that cannot be cut", [&] {
    refused({column, {"plain", {}}}, "only lockstep::nn's Linear and Embedding");
    refused({column, {"embedding", {.kind = CutKind::row}}}, "is an embedding");
    refused({column, {"second", {.kind = CutKind::vocabulary}}}, "has a bias");
    refused({column, {"second", {.kind = CutKind::column, .unit = 5}}}, "the 8 outputs");
  });
  cells.cell("a layer that is cut twice", [&] {
    Mixed model;
    apply(model, {column})();
    cells.expect_usage_error(apply(model, {column}), "'first' is cut over");
    apply(model, {{"second", {.kind = CutKind::row}}})();
    cells.expect(cut_parameters(model).size() == 3, "another number of parts");
  });
  cells.cell("a weight that two layers share", [&] {
    Mixed model;
    model.register_module("tied", std::make_shared<TiedLinear>(model.first->weight));
    refused_of(model, {column, {"tied", {.kind = CutKind::column}}},
               "'first' and 'tied' share a weight");
  });
  cells.cell("the product of a layer that is cut by vocabulary", [&] {
    Linear layer(8, 12, Bias::none);
    layer->cut({.kind = CutKind::vocabulary}, axis, "head");
    cells.expect_usage_error([&] { layer->forward(at::zeros({2, 8})); }, "has no forward()");
  });
  cells.cell("products of no layer, and of four", [&] {
    ColumnParallelLinear layer(8, 12);
    auto* const one = layer.get();
    cells.expect_usage_error([&] { linears(at::zeros({2, 8}), {}); }, "given 0");
    cells.expect_usage_error([&] { linears(at::zeros({2, 8}), {one, one, one, one}); }, "given 4");
  });
  cells.cell("gradients of gradients of a column", [&] {
    ColumnParallelLinear layer(8, 12);
    cut_parallel_layers(*layer, axis);
    const at::Tensor x = at::randn({2, 8}).requires_grad_();
    const at::Tensor y = layer->forward(x);
    cells.expect_usage_error(
        [&] { torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true); },
        "no second derivative");
  });
}

// Each of the ranks that disagree gets an error.
void check_one_disagreement(Cells& cells, const std::string& name, BetweenLayers between,
                            const std::vector<std::int64_t>& usual,
                            const std::vector<std::int64_t>& of_first) {
  cells.cell(name, [&] {
    const auto group = cells.group()->split(0, cells.rank(), "mistaken");
    ParallelMLP mlp(8, 24);
    cut_parallel_layers(mlp, std::make_shared<TensorAxis>(group, between));
    try {
      mlp.forward(at::zeros(cells.rank() == 0 ? of_first : usual));
    } catch (const CommError& error) {
      return cells.expect(error.fault() == Fault::mismatch,
                          std::string("another fault: ") + error.what());
    }
    cells.expect(false, "no CommError");
  });
}

}  // namespace

void check_tensor_mistakes(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  check_sizes(cells);
  check_plans(cells);
}

void check_ranks_that_disagree(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  check_one_disagreement(cells, "ranks with other batches", BetweenLayers::whole, {2, 12, 8},
                         {3, 12, 8});
  check_one_disagreement(cells, "ranks with other lengths", BetweenLayers::by_positions, {2, 3, 8},
                         {2, 4, 8});
  check_one_disagreement(cells, "ranks with other shapes of one size", BetweenLayers::by_positions,
                         {2, 6, 8}, {3, 4, 8});
}

}  // namespace lockstep::nn
