// Modules as users write them, with torch::nn alone, compared with the same ones cut by a plan.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/optimizer.h>
#include <torch/utils.h>

#include <lockstep/parallel/tensor/parallelize_module.h>

#include "against_whole.h"

namespace lockstep::tensor {

inline constexpr nn::Precision kPlainPrecisions[] = {{at::kDouble, 1e-9}, {at::kFloat, 1e-5}};

using Activation = std::function<at::Tensor(const at::Tensor&)>;

struct PlainMlp : torch::nn::Module {
  explicit PlainMlp(Activation activation, bool with_bias = true)
      : fc1(register_module("fc1",
                            torch::nn::Linear(torch::nn::LinearOptions(8, 24).bias(with_bias)))),
        fc2(register_module("fc2",
                            torch::nn::Linear(torch::nn::LinearOptions(24, 8).bias(with_bias)))),
        activation(std::move(activation)) {}

  at::Tensor forward(const at::Tensor& x) { return fc2(activation(fc1(x))); }

  torch::nn::Linear fc1, fc2;
  Activation activation;
};

struct PlainBlock : torch::nn::Module {
  PlainBlock()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        fc1(register_module("fc1", torch::nn::Linear(8, 24))),
        fc2(register_module("fc2", torch::nn::Linear(24, 8))) {}

  at::Tensor forward(const at::Tensor& x) { return x + fc2(at::gelu(fc1(norm(x)))); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear fc1, fc2;
};

// Two residual blocks and a norm.
struct PlainBlocks : torch::nn::Module {
  PlainBlocks()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))) {
    for (int i = 0; i < 2; ++i) blocks->push_back(std::make_shared<PlainBlock>());
    register_module("blocks", blocks);
  }

  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<PlainBlock>()->forward(x);
    return norm(x);
  }

  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
};

inline const Plan kColumnThenRow = {{"fc1", Cut::column}, {"fc2", Cut::row}};

inline std::set<std::string> gathering_operators(const ParallelizedModule& module) {
  std::set<std::string> operators;
  for (const Gathered& one : module.gathers()) operators.insert(one.op);
  return operators;
}

inline void expect_gathered_by(ranks::Cells& cells, const ParallelizedModule& module,
                               const std::set<std::string>& operators) {
  const auto got = gathering_operators(module);
  if (cells.num_ranks() == 1) return cells.expect(got.empty(), "one rank gathers");
  cells.expect(got == operators, fmt::format("gathered by [{}] where right is [{}]",
                                             fmt::join(got, ", "), fmt::join(operators, ", ")));
}

// One pass: gets the model, its input, and the number of the pass.
template <typename Model>
using LossOf = std::function<at::Tensor(Model&, const at::Tensor&, int)>;

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

template <typename Model>
struct PlainCase {
  std::function<std::shared_ptr<Model>()> make;
  Plan plan = kColumnThenRow;
  std::vector<std::int64_t> input = {6, 8};
  LossOf<Model> loss;
  MakeOptimizer optimizer;
  double max_norm = 0;  // clips gradients to this norm if it is above 0
  std::set<std::string> gathers;
  int num_passes = 1;  // passes in a step
};

// Trains both models for five steps, and compares losses, gradients of the input and of all
// parameters, their norm, and weights.
template <typename Model>
void expect_same_training(ranks::Cells& cells, const PlainCase<Model>& one,
                          const nn::Precision& precision);

template <typename Model>
void expect_same_weights(ranks::Cells& cells, Model& cut, Model& whole, double tolerance) {
  const auto parameters = cut.named_parameters();
  for (const auto& item : whole.named_parameters())
    nn::expect_within(cells, full_tensor(parameters[item.key()].detach()), item.value(), tolerance,
                      item.key());
}

template <typename Model>
void expect_same_plain_gradients(ranks::Cells& cells, Model& cut, Model& whole, double tolerance) {
  const auto parameters = cut.named_parameters();
  for (const auto& item : whole.named_parameters()) {
    const at::Tensor& mine = parameters[item.key()];
    const std::string what = "the gradient of " + item.key();
    if (!item.value().grad().defined()) {
      cells.expect(!mine.grad().defined(), what + " is there");
      continue;
    }
    cells.expect(mine.grad().defined() && is_cut(mine) == is_cut(mine.grad()),
                 what + " is missing, or not cut as the parameter");
    if (mine.grad().defined())
      nn::expect_within(cells, full_tensor(mine.grad()), item.value().grad(), tolerance, what);
  }
}

double clip_plain(torch::nn::Module& model, double max_norm);

template <typename Model>
void expect_same_training(ranks::Cells& cells, const PlainCase<Model>& one,
                          const nn::Precision& precision) {
  torch::manual_seed(3);
  const auto whole = one.make();
  // The first rank's weights replace those of the others.
  torch::manual_seed(3 + cells.rank());
  const auto cut = one.make();
  whole->to(precision.device, precision.type);
  cut->to(precision.device, precision.type);
  auto parallelized = parallelize_module(*cut, cells.group(), one.plan);
  const auto whole_optimizer = one.optimizer(whole->parameters());
  const auto cut_optimizer = one.optimizer(cut->parameters());
  for (int step = 0; step < 5; ++step) {
    for (int pass = 0; pass < one.num_passes; ++pass) {
      const int number = step * one.num_passes + pass;
      torch::manual_seed(100 + number);
      const at::Tensor x = at::randn(one.input, precision.type).to(precision.device);
      const at::Tensor of_whole = nn::leaf(x), of_cut = nn::leaf(x);
      torch::manual_seed(200 + number);
      const at::Tensor wanted = one.loss(*whole, of_whole, number);
      torch::manual_seed(200 + number);
      const at::Tensor got = one.loss(*cut, of_cut, number);
      nn::expect_within(cells, got, wanted, precision.tolerance, fmt::format("loss {}", number));
      wanted.backward();
      got.backward();
      nn::expect_within(cells, of_cut.grad(), of_whole.grad(), precision.tolerance,
                        fmt::format("the input's gradient {}", number));
    }
    expect_gathered_by(cells, parallelized, one.gathers);
    expect_same_plain_gradients(cells, *cut, *whole, precision.tolerance);
    if (one.max_norm > 0) {
      const double wanted = clip_plain(*whole, one.max_norm), got = clip_plain(*cut, one.max_norm);
      cells.expect(std::abs(got - wanted) <= precision.tolerance * wanted,
                   fmt::format("a norm of {} where right is {}", got, wanted));
      cells.expect(wanted > one.max_norm, "nothing to clip");
    }
    whole_optimizer->step();
    cut_optimizer->step();
    whole_optimizer->zero_grad();
    cut_optimizer->zero_grad();
    expect_gathered_by(cells, parallelized, one.gathers);
  }
  expect_same_weights(cells, *cut, *whole, precision.tolerance);
}

std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<at::Tensor> parameters);
std::unique_ptr<torch::optim::Optimizer> momentum(std::vector<at::Tensor> parameters);

// The mean of squares with weights of both signs, so that it is no symmetric function of the
// output.
inline at::Tensor uneven_loss(const at::Tensor& y) {
  return (y.square() * at::linspace(-1, 2, y.numel(), y.options()).view(y.sizes())).mean();
}

}  // namespace lockstep::tensor
