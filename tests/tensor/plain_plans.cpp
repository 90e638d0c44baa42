#include <stdexcept>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/tensor/suggest_tensor_plan.h>

#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;

constexpr int kManyRanks = 4;

std::string text_of(const Plan& plan) {
  std::string text;
  for (const PlannedCut& one : plan)
    text += fmt::format("{} by {}; ", one.layers, name_of(one.cut));
  return text;
}

void expect_plan(Cells& cells, const SuggestedPlan& suggested, const std::string& wanted) {
  cells.expect(
      text_of(suggested.plan) == wanted,
      fmt::format("'{}' is suggested where '{}' is right", text_of(suggested.plan), wanted));
  cells.expect(suggested.cost.gathers.empty(), "it gathers: " + suggested.text());
}

void expect_reason(Cells& cells, const SuggestedPlan& suggested, const std::string& layer,
                   const std::string& reason) {
  const auto one = std::ranges::find(suggested.whole, layer, &SuggestedPlan::Whole::layer);
  cells.expect(one != suggested.whole.end() && one->reason.find(reason) != std::string::npos,
               fmt::format("'{}' does not say of '{}' that '{}'", suggested.text(), layer, reason));
}

void check_blocks(Cells& cells) {
  PlainBlocks model;
  const at::Tensor x = at::randn({2, 3, 8}).requires_grad_();
  const auto step = [&] { return uneven_loss(model.forward(x)); };
  const auto suggested = suggest_tensor_plan(model, kManyRanks, step);
  expect_plan(cells, suggested, "blocks.*.fc1 by columns; blocks.*.fc2 by rows; ");
  const PlanCost& cost = suggested.cost;
  // Two sums of the activation a block.
  cells.expect(cost.sums == 4 && cost.summed_bytes == 4 * x.numel() * 4,
               fmt::format("{} sums of {} bytes", cost.sums, cost.summed_bytes));
  const std::int64_t cut = 2 * 4 * (8 * 24 + 24 + 24 * 8);
  cells.expect(
      cost.whole_parameter_bytes - cost.parameter_bytes == cut * 3 / 4,
      fmt::format("{} of {} bytes of weights", cost.parameter_bytes, cost.whole_parameter_bytes));
  cells.expect(suggested.text().find("\"tensor_plan\": {\"blocks.*.fc1\": \"column\", "
                                     "\"blocks.*.fc2\": \"row\"}") == 0,
               suggested.text());
}

struct Reader : torch::nn::Module {
  Reader() {
    register_module("words", words);
    register_module("positions", positions);
    register_module("encoder", encoder);
    register_module("head", head);
  }
  at::Tensor loss(const at::Tensor& ids) {  // [positions, samples]
    const at::Tensor places = at::arange(ids.size(0)).unsqueeze(1);
    const at::Tensor scores = head(encoder(words(ids) + positions(places)));
    return torch::nn::functional::cross_entropy(scores.flatten(0, 1), ids.flatten());
  }
  torch::nn::Embedding words{64, 16}, positions{4, 16};
  torch::nn::TransformerEncoder encoder{torch::nn::TransformerEncoderOptions(
      torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(24)),
      2)};
  torch::nn::Linear head{16, 64};
};

void check_reader(Cells& cells) {
  Reader model;
  const at::Tensor ids = at::arange(8).view({4, 2});
  const auto suggested = suggest_tensor_plan(model, kManyRanks, [&] { return model.loss(ids); });
  expect_plan(cells, suggested,
              "words by rows; encoder.layers.*.self_attn by heads; encoder.layers.*.linear1 by "
              "columns; encoder.layers.*.linear2 by rows; head by columns; ");
  expect_reason(cells, suggested, "positions", "no larger than what a step looks up");
}

// Gates, layers in one Sequential, queries, keys and values of one product, and a norm over
// features that need to be whole.
struct Mixed : torch::nn::Module {
  Mixed() {
    register_module("gate", gate);
    register_module("up", up);
    register_module("down", down);
    register_module("chain", chain);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("normed", normed);
    register_module("after", after);
    register_module("odd", odd);
    register_module("unused", unused);
  }
  at::Tensor forward(at::Tensor x) {
    x = x + down(at::silu(gate(x)) * up(x));
    x = x + chain->forward(x);
    const auto parts = qkv(x).chunk(3, -1);
    x = x + out(at::softmax(parts[0] * parts[1], 0) * parts[2]);
    x = x + after(at::layer_norm(normed(x), {16}));
    return x + odd(x).mean();
  }
  torch::nn::Linear gate{8, 16}, up{8, 16}, down{16, 8};
  torch::nn::Sequential chain{torch::nn::Linear(8, 16), torch::nn::ReLU(),
                              torch::nn::Linear(16, 12), torch::nn::ReLU(),
                              torch::nn::Linear(12, 8)};
  torch::nn::Linear qkv{8, 48}, out{16, 8}, normed{8, 16}, after{16, 8}, odd{8, 7}, unused{8, 8};
};

void check_mixed(Cells& cells) {
  Mixed model;
  const at::Tensor x = at::randn({6, 8});
  const auto suggested =
      suggest_tensor_plan(model, kManyRanks, [&] { return uneven_loss(model.forward(x)); });
  expect_plan(cells, suggested,
              "gate by columns; up by columns; down by rows; chain.0 by columns; chain.2 by rows; "
              "qkv by columns of queries, keys and values; out by rows; ");
  expect_reason(cells, suggested, "chain.4", "aten::addmm needs all of it: 576 bytes a step");
  expect_reason(cells, suggested, "normed", "aten::layer_norm needs all of it: 384 bytes a step");
  expect_reason(cells, suggested, "odd", "7 is no multiple of 4");
  expect_reason(cells, suggested, "unused", "the step does not use it");
}

// What a real group gathers is what was said before.
void check_costs(Cells& cells) {
  const int ranks = cells.num_ranks();
  if (ranks == 1) return;
  const auto model_of = [] {
    torch::manual_seed(3);
    return std::make_shared<PlainMlp>(
        [](const at::Tensor& x) { return at::layer_norm(x, {x.size(-1)}); });
  };
  const auto model = model_of(), cut = model_of();
  const at::Tensor x = at::randn({6, 8});
  const auto cost =
      cost_of_plan(*model, kColumnThenRow, ranks, [&] { return uneven_loss(model->forward(x)); });
  auto parallelized = parallelize_module(*cut, cells.group(), kColumnThenRow);
  uneven_loss(cut->forward(x)).backward();
  const auto real = parallelized.gathers();
  cells.expect(cost.gathers.size() == 1 && real.size() == 1, "another number of gathers");
  if (cost.gathers.size() != 1 || real.size() != 1) return;
  cells.expect(
      cost.gathers[0].op == real[0].op && cost.gathers[0].source == real[0].source &&
          cost.gathers[0].bytes == real[0].bytes,
      fmt::format("{} bytes were said, and {} gathered", cost.gathers[0].bytes, real[0].bytes));
  // The norm's output is whole, and the row uses a part: its gradient is gathered.
  cells.expect(cost.gathered_gradient_bytes == 6 * 24 * 4,
               fmt::format("{} bytes of gradients", cost.gathered_gradient_bytes));
}

struct NormedMlp : torch::nn::Module {
  NormedMlp() {
    register_module("norm", norm);
    register_module("mlp", mlp);
  }
  torch::nn::BatchNorm1d norm{8};
  std::shared_ptr<PlainMlp> mlp =
      std::make_shared<PlainMlp>([](const at::Tensor& x) { return at::dropout(x, 0.5, true); });
};

at::Tensor state_of_generator() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

// The model is as before: weights and their memory, gradients, buffers, random numbers, and what is
// saved of it.
void check_model_is_as_before(Cells& cells) {
  NormedMlp model;
  const at::Tensor x = at::randn({6, 8});
  const auto step = [&] { return uneven_loss(model.mlp->forward(model.norm(x))); };
  step().backward();
  struct Before {
    std::string name;
    at::Tensor parameter, values, gradient;
    void* memory;
  };
  std::vector<Before> before;
  for (const auto& item : model.named_parameters())
    before.push_back({item.key(), item.value(), item.value().detach().clone(),
                      item.value().grad().clone(), item.value().data_ptr()});
  const at::Tensor mean = model.norm->running_mean.clone();
  const at::Tensor generator = state_of_generator();
  const auto expect_as_before = [&](const std::string& when) {
    for (const Before& one : before) {
      cells.expect(!is_cut(one.parameter) && one.parameter.data_ptr() == one.memory,
                   fmt::format("{}: {} lies elsewhere", when, one.name));
      cells.expect_same(one.parameter.detach(), one.values, when + ": " + one.name);
      cells.expect_same(one.parameter.grad(), one.gradient, when + ": the gradient of " + one.name);
    }
    cells.expect_same(model.norm->running_mean, mean, when + ": a buffer");
    cells.expect(at::equal(state_of_generator(), generator), when + ": random numbers");
    cells.expect(nn::cut_parameters(model).empty(), when + ": a record of the cut");
  };
  expect_plan(cells, suggest_tensor_plan(model, kManyRanks, step),
              "mlp.fc1 by columns; mlp.fc2 by rows; ");
  expect_as_before("after a suggestion");
  bool threw = false;
  try {
    cost_of_plan(model, {{"mlp.fc1", Cut::column}}, 2, [&]() -> at::Tensor {
      throw std::runtime_error(fmt::format("{}", step().dim()));
    });
  } catch (const std::runtime_error&) {
    threw = true;
  }
  cells.expect(threw, "the step's exception is lost");
  expect_as_before("after a step that throws");
  cells.expect_usage_error(
      [&] {
        cost_of_plan(model, {{"mlp.fc3", Cut::column}}, 2, step);
      },
      "is called 'mlp.fc3'");
  cells.expect_usage_error([&] { suggest_tensor_plan(model, 1, step); }, "two ranks or more");
  expect_as_before("after mistakes");
  // It trains as before, and graphs of earlier steps do not matter.
  for (const Before& one : before) one.parameter.mutable_grad() = at::Tensor();
  step().backward();
  cells.expect(model.mlp->fc1->weight.grad().sizes() == model.mlp->fc1->weight.sizes(),
               "it does not train any more");
  // And can be cut for good.
  parallelize_module(model, cells.group(), {{"mlp.fc1", Cut::column}, {"mlp.fc2", Cut::row}});
  step().backward();
}

}  // namespace

void check_plain_plans(Cells& cells) {
  cells.cell("a plan for blocks", [&] { check_blocks(cells); });
  cells.cell("a plan for an encoder", [&] { check_reader(cells); });
  cells.cell("a plan for layers of all kinds", [&] { check_mixed(cells); });
  cells.cell("what a plan costs", [&] { check_costs(cells); });
  cells.cell("a model after a suggestion", [&] { check_model_is_as_before(cells); });
}

}  // namespace lockstep::tensor
