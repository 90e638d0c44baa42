#include <optional>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_parallel/tensor_parallel.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/parameters.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>

#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;

at::Tensor relu_of(const at::Tensor& x) { return at::relu(x); }

// Two layers that share one weight.
struct TiedWeights : torch::nn::Module {
  TiedWeights()
      : in(register_module("in", torch::nn::Linear(8, 24))),
        out(register_module("out", std::make_shared<Out>(in->weight))) {}

  struct Out : torch::nn::Module {
    explicit Out(const at::Tensor& weight) { register_parameter("table", weight); }
  };

  torch::nn::Linear in;
  std::shared_ptr<Out> out;
};

void check_wrong_plans(Cells& cells) {
  const int ranks = cells.num_ranks();
  const auto refused = [&](torch::nn::Module& model, const Plan& plan, const std::string& part) {
    cells.expect_usage_error([&] { parallelize_module(model, cells.group(), plan); }, part);
    for (const at::Tensor& parameter : model.parameters())
      cells.expect(!is_cut(parameter), "something is cut all the same");
  };
  cells.cell("plans that make no sense", [&] {
    PlainMlp model(relu_of);
    refused(model, {}, "names no layer");
    refused(model, {{"fc1", Cut::column}, {"fc3", Cut::row}}, "is called 'fc3'");
    refused(model, {{"fc1", Cut::column}, {"f*", Cut::row}}, "'fc1' is cut by 'fc1' and by 'f*'");
    PlainBlocks blocks;
    refused(blocks, {{"blocks.*.norm", Cut::column}}, "torch::nn::LayerNorm");
    refused(blocks, {{"blocks.*", Cut::column}}, "only torch::nn::Linear");
    refused(blocks, {{"*.fc1", Cut::column}}, "is called '*.fc1'");
  });
  cells.cell("plain sizes that do not divide", [&] {
    if (ranks == 1) return;
    torch::nn::Sequential model(torch::nn::Linear(8, 24 * ranks + 1),
                                torch::nn::Linear(24 * ranks + 1, 8));
    refused(*model, {{"0", Cut::column}},
            fmt::format("{} is no multiple of {}", 24 * ranks + 1, ranks));
    refused(*model, {{"1", Cut::row}},
            fmt::format("[8, {}] cannot be cut by rows over the {} ranks", 24 * ranks + 1, ranks));
  });
  cells.cell("a weight that another module has", [&] {
    TiedWeights model;
    refused(model, {{"in", Cut::column}}, "'in.weight' and 'out.table' share their memory");
  });
  cells.cell("cut twice", [&] {
    if (ranks == 1) return;
    torch::manual_seed(3);
    PlainMlp whole(relu_of);
    torch::manual_seed(3);
    PlainMlp model(relu_of);
    parallelize_module(model, cells.group(), {{"fc1", Cut::column}});
    cells.expect_usage_error(
        [&] {
          parallelize_module(model, cells.group(), {{"fc1", Cut::column}});
        },
        "cut already");
    // Cutting another layer later is allowed; activations are gathered between the two.
    auto later = parallelize_module(model, cells.group(), {{"fc2", Cut::row}});
    for (PlainMlp* const one : {&whole, &model})
      uneven_loss(one->forward(at::ones({2, 8}))).backward();
    expect_same_plain_gradients(cells, model, whole, 1e-5);
    cells.expect(later.cut_parameters().size() == 3, "it does not know of all that is cut");
  });
}

void check_plans_that_differ(Cells& cells) {
  const int ranks = cells.num_ranks();
  if (ranks == 1) return;
  const bool last = cells.rank() == ranks - 1;
  PlainMlp model(relu_of);
  cells.expect_usage_error(
      [&] {
        parallelize_module(model, cells.group(),
                           {{"fc1", last ? Cut::row : Cut::column}, {"fc2", Cut::row}});
      },
      "cut by rows");
  cells.expect_usage_error(
      [&] {
        parallelize_module(model, cells.group(), {{last ? "fc3" : "fc1", Cut::column}});
      },
      "is called 'fc3'");
  cells.expect(!is_cut(model.fc1->weight), "it is cut all the same");
}

// Operations that are impossible on a tensor that is cut, or whose effect would be lost silently.
void check_refused_operators(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  PlainMlp model(relu_of);
  parallelize_module(model, cells.group(), kColumnThenRow);
  at::Tensor weight = model.fc1->weight;
  const at::Tensor y = model.fc1(at::ones({2, 8}));
  cells.expect_usage_error([&] { weight.mul_(2); }, "NoGradGuard");
  cells.expect_usage_error([&] { weight.set_data(at::zeros({24, 8})); }, "load_full_state_dict()");
  cells.expect_usage_error([&] { at::zeros({24, 8}).set_data(weight); }, "full_tensor()");
  cells.expect_usage_error([&] { y.as_strided({2}, {1}); }, "aten::as_strided");
  cells.expect_usage_error([&] { y.detach().resize_({3}); }, "aten::resize_");
  // These views would be copies.
  const torch::NoGradGuard no_grad;
  cells.expect_usage_error([&] { weight.slice(0, 1, 3).zero_(); }, "writes to what aten::slice");
  const at::Tensor rows = weight.slice(0, 1, 3);
  const at::Tensor before = rows.clone();
  weight.add_(1);
  cells.expect_usage_error([&] { rows.sum(); }, "after that tensor was written to");
  cells.expect_close(weight.slice(0, 1, 3), before + 1, "a view taken again");
}

// What accesses memory directly and not through operators.
void check_direct_access(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  const auto model = std::make_shared<PlainMlp>(relu_of);
  parallelize_module(*model, cells.group(), kColumnThenRow);
  std::vector<NamedTensor> parameters;
  for (const auto& item : model->named_parameters())
    parameters.push_back({item.key(), item.value()});
  cells.expect_usage_error(
      [&] {
        const auto optimizer =
            optim::make_optimizer(optim::AdamWOptions{}, optim::decay_groups(parameters, 0.1));
        model->forward(at::ones({2, 8})).sum().backward();
        optimizer->step(0.1);
      },
      "has no memory here");
  bool thrown = false;
  try {
    model->fc1->clone();
  } catch (const std::exception&) {
    thrown = true;
  }
  cells.expect(thrown, "a layer that is cut can be cloned");
}

// The error comes before anything is changed: a wrapped model trains as it did.
void check_wrapped(Cells& cells) {
  const auto refused = [&](PlainMlp& model) {
    const auto cut_plain = [&](torch::nn::Module& part, const Plan& plan) {
      parallelize_module(part, cells.group(), plan);
    };
    cells.expect_usage_error([&] { cut_plain(model, kColumnThenRow); },
                             "call it before wrap_model()");
    torch::nn::Module larger("larger");
    larger.register_module("inner", model.shared_from_this());
    cells.expect_usage_error(
        [&] {
          cut_plain(larger, {{"inner.fc1", Cut::column}});
        },
        "'inner.fc1.weight' of a model that is wrapped");
    cells.expect_usage_error([&] { cut_plain(*model.fc1, {{"", Cut::column}}); }, "wrap_model()");
    cells.expect(!is_cut(model.fc1->weight) && model.fc1->children().size() <= 1,
                 "something is cut all the same");
    uneven_loss(model.forward(at::ones({2, 8}))).backward();
    cells.expect(model.fc1->weight.grad().defined(), "it does not train any more");
  };
  const auto model = [] { return std::make_shared<PlainMlp>(relu_of); };
  for (const bool optimizer_is_cut : {false, true}) {
    const auto replicated = model();
    std::optional<shard::OptimizerShards> shards;
    if (optimizer_is_cut) shards.emplace(*replicated, cells.group());
    const replicate::DistributedDataParallel parallel(*replicated, cells.group());
    refused(*replicated);
  }
  for (const auto cut : {shard::Cut::gradients, shard::Cut::gradients_and_parameters}) {
    const auto sharded = model();
    const shard::FullyShardedDataParallel parallel(*sharded, shard::shard_over(cells.group()),
                                                   {.cut = cut});
    refused(*sharded);
  }
  // These layers can be cut by themselves.
  nn::ColumnParallelLinear layer(8, 12 * cells.num_ranks());
  const replicate::DistributedDataParallel parallel(*layer, cells.group());
  const auto axis = std::make_shared<nn::TensorAxis>(cells.group());
  cells.expect_usage_error([&] { nn::cut_parallel_layers(*layer, axis); },
                           "call it before wrap_model()");
  cells.expect(layer->axis() == nullptr, "it is cut all the same");
}

}  // namespace

void check_plain_mistakes(Cells& cells) {
  check_wrong_plans(cells);
  cells.cell("plans that differ", [&] { check_plans_that_differ(cells); });
  cells.cell("operators that are refused", [&] { check_refused_operators(cells); });
  cells.cell("what is wrapped is not cut any more", [&] { check_wrapped(cells); });
  cells.cell("what reads memory directly", [&] { check_direct_access(cells); });
}

}  // namespace lockstep::tensor
