#include <sstream>

#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

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

struct InFiles : torch::nn::Module {
  InFiles()
      : table(register_module("table", VocabParallelEmbedding(13, 8))),
        up(register_module("up", ColumnParallelLinear(8, 24))),
        down(register_module("down", RowParallelLinear(24, 8))) {}

  at::Tensor forward(const at::Tensor& tokens) { return down(up(table(tokens))); }

  VocabParallelEmbedding table;
  ColumnParallelLinear up;
  RowParallelLinear down;
};

// A part of a weight is neither written as the weight nor replaced by all of it.
void check_parts_in_files(Cells& cells) {
  const at::Tensor tokens = at::arange(5).view({1, 5});
  torch::manual_seed(3);
  const auto whole = std::make_shared<InFiles>();
  std::ostringstream file;
  torch::save(whole, file);
  torch::manual_seed(4);
  auto model = std::make_shared<InFiles>();
  std::istringstream before(file.str());
  torch::load(model, before);
  cut_parallel_layers(*model, axis_of(cells));
  cells.cell("a model that was loaded before it is cut", [&] {
    cells.expect_close(model->forward(tokens), whole->forward(tokens), "the output");
  });
  cells.cell("files of layers that are cut", [&] {
    for (const auto& item : model->named_children()) {
      std::ostringstream stream;
      cells.expect_usage_error([&] { torch::save(item.value(), stream); },
                               "torch::save() of '" + item.key() + "' is about this rank's part");
    }
    std::ostringstream all;
    cells.expect_usage_error([&] { torch::save(model, all); }, "dist.full_state_dict()");
    std::istringstream stream(file.str());
    cells.expect_usage_error([&] { torch::load(model, stream); },
                             "torch::load() of 'table' is about this rank's part");
    cells.expect_close(model->forward(tokens), whole->forward(tokens), "the output");
  });
  cells.cell("weights of layers that are cut in another shape", [&] {
    const auto refused = [&](at::Tensor& weight, const at::Tensor& of_whole,
                             const std::string& name, const std::function<void()>& use) {
      const at::Tensor part = weight.data();
      weight.set_data(of_whole.data());
      cells.expect_usage_error(use, "'" + name + "' is of shape [");
      weight.set_data(part);
    };
    const at::Tensor x = at::ones({1, 5, 8}), inner = at::ones({1, 5, 24 / cells.num_ranks()});
    refused(model->table->weight, whole->table->weight, "table.weight",
            [&] { model->table(tokens); });
    refused(model->up->weight, whole->up->weight, "up.weight", [&] { model->up(x); });
    refused(model->up->bias, whole->up->bias, "up.bias", [&] { model->up(x); });
    refused(model->up->weight, whole->up->weight, "up.weight", [&] {
      linears(x, {model->up.get(), model->up.get()});
    });
    refused(model->down->weight, whole->down->weight, "down.weight", [&] { model->down(inner); });
    // Another dtype is no other shape.
    model->to(at::kDouble);
    whole->to(at::kDouble);
    cells.expect_close(model->forward(tokens), whole->forward(tokens), "the output in float64");
  });
  cells.cell("layers that are cut over one rank are whole", [&] {
    const auto alone = cells.group()->split(cells.rank(), 0, "alone");
    ColumnParallelLinear layer(8, 24);
    cut_parallel_layers(*layer, std::make_shared<TensorAxis>(alone));
    std::stringstream stream;
    torch::save(layer, stream);
    torch::load(layer, stream);
    layer->forward(at::ones({2, 8}));
  });
}

// Each of the ranks that disagree gets an error, without numbers that only we know.
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
      const std::string text = error.what();
      return cells.expect(error.fault() == Fault::mismatch && text.find("subject") == text.npos &&
                              (between == BetweenLayers::whole ||
                               text.find(" along the dim that is cut") != text.npos),
                          "another error: " + text);
    }
    cells.expect(false, "no CommError");
  });
}

}  // namespace

void check_tensor_mistakes(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  check_sizes(cells);
  check_plans(cells);
  check_parts_in_files(cells);
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
