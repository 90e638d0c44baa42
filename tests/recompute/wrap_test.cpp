#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/recompute/wrap_activation_checkpointing.h>

#include "../base/errors.h"
#include "expect_equal.h"

namespace lockstep {
namespace {

using activations::blocks_of;
// How often the block of each number has run.
std::vector<int> runs;

class BlockImpl : public torch::nn::Cloneable<BlockImpl> {
 public:
  explicit BlockImpl(std::size_t number) : number(number) { reset(); }
  void reset() override {
    linear = register_module("linear", torch::nn::Linear(6, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    dropout = register_module("dropout", torch::nn::Dropout(0.3));
  }
  at::Tensor forward(const at::Tensor& x) {
    runs.resize(std::max(runs.size(), number + 1));
    ++runs[number];
    return x + dropout(norm(linear(x)).tanh());
  }

  std::size_t number;
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Block);

class HeadImpl : public torch::nn::Module {
 public:
  HeadImpl() { linear = register_module("linear", torch::nn::Linear(6, 2)); }
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Head);

torch::nn::Sequential blocks_and_head(std::size_t count) {
  at::manual_seed(1);
  torch::nn::Sequential model;
  model->push_back("in", torch::nn::Linear(4, 6));
  for (std::size_t i = 0; i < count; ++i) model->push_back("block" + std::to_string(i), Block(i));
  model->push_back("head", Head());
  return model;
}

// A model that calls the blocks in its list, in one of two ways.
template <typename List>
class Stack : public torch::nn::Module {
 public:
  explicit Stack(std::size_t count) {
    at::manual_seed(1);
    blocks = register_module("blocks", List());
    for (std::size_t i = 0; i < count; ++i) blocks->push_back(Block(i));
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      if constexpr (std::is_same_v<List, BlockList>)
        x = blocks->template call<Block>(i, x);
      else
        x = blocks[i]->template as<Block>()->forward(x);
    }
    return x;
  }

  List blocks{nullptr};
};

// Gradients and buffers after two steps.
template <typename Model>
Tensors trained(Model& model, std::int64_t width) {
  at::manual_seed(7);
  runs.clear();
  Tensors found;
  for (int step = 0; step < 2; ++step) {
    const auto y = model->forward(at::randn({5, width}));
    y.square().sum().backward();
    found.push_back(y.detach());
  }
  for (const auto& parameter : model->parameters()) found.push_back(parameter.grad());
  for (const auto& buffer : model->buffers()) found.push_back(buffer);
  found.push_back(at::rand({3}));
  return found;
}

TEST(WrapActivationCheckpointing, RecomputesBlocksOfASequential) {
  auto plain = blocks_and_head(4);
  const auto expected = trained(plain, 4);
  EXPECT_EQ(runs, (std::vector{2, 2, 2, 2}));

  auto model = blocks_and_head(4);
  EXPECT_EQ(wrap_activation_checkpointing(*model, blocks_of<Block>()), 4u);
  expect_equal(expected, trained(model, 4));
  EXPECT_EQ(runs, (std::vector{4, 4, 4, 4}));
}

TEST(WrapActivationCheckpointing, KeepsNamesAndModules) {
  const auto plain = blocks_and_head(2);
  auto model = blocks_and_head(2);
  wrap_activation_checkpointing(*model, blocks_of<BlockImpl>());
  EXPECT_EQ(model->named_parameters().keys(), plain->named_parameters().keys());
  EXPECT_EQ(model->named_modules().keys(), plain->named_modules().keys());
  EXPECT_EQ(model->ptr(1), model->named_children()["block0"]);
  EXPECT_NE(model->ptr(1)->as<BlockImpl>(), nullptr);
  model->eval();
  const auto x = at::randn({5, 4});
  EXPECT_TRUE(model->forward(x).equal(model->forward(x)));
}

TEST(WrapActivationCheckpointing, ChangesNothingTheSecondTime) {
  auto model = blocks_and_head(2);
  wrap_activation_checkpointing(*model, blocks_of<BlockImpl>());
  wrap_activation_checkpointing(*model, blocks_of<BlockImpl>());
  trained(model, 4);
  EXPECT_EQ(runs, (std::vector{4, 4}));
}

TEST(WrapActivationCheckpointing, IsInClonesToo) {
  torch::nn::Sequential model(Block(0), Block(1));
  wrap_activation_checkpointing(*model, blocks_of<BlockImpl>());
  auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  EXPECT_EQ(copy->named_parameters().keys(), model->named_parameters().keys());
  trained(copy, 6);
  EXPECT_EQ(runs, (std::vector{4, 4}));
  for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(WrapActivationCheckpointing, TakesEverySecondBlockOrThoseThatAreNamed) {
  auto model = blocks_and_head(5);
  auto policy = blocks_of<BlockImpl>();
  policy.every = 2;
  EXPECT_EQ(wrap_activation_checkpointing(*model, policy), 2u);
  trained(model, 4);
  EXPECT_EQ(runs, (std::vector{2, 4, 2, 4, 2}));

  model = blocks_and_head(3);
  const auto named = [](const std::string& name, const torch::nn::Module&) {
    return name == "block1" || name == "head";
  };
  EXPECT_EQ(wrap_activation_checkpointing(*model, {.is_block = named}), 2u);
  trained(model, 4);
  EXPECT_EQ(runs, (std::vector{2, 4, 2}));
}

TEST(WrapActivationCheckpointing, RecomputesBlocksOfAModelWithin) {
  class Outer : public torch::nn::Module {
   public:
    Outer() { body = register_module("body", torch::nn::Sequential(Block(0), Block(1))); }
    at::Tensor forward(const at::Tensor& x) { return body->forward(x).exp(); }
    torch::nn::Sequential body{nullptr};
  };
  at::manual_seed(1);
  auto plain = std::make_shared<Outer>();
  const auto expected = trained(plain, 6);
  at::manual_seed(1);
  auto model = std::make_shared<Outer>();
  wrap_activation_checkpointing(*model, blocks_of<BlockImpl>());
  expect_equal(expected, trained(model, 6));
  EXPECT_EQ(runs, (std::vector{4, 4}));
}

TEST(WrapActivationCheckpointing, PassesOnWhateverBlocksTakeAndReturn) {
  using Pair = std::tuple<at::Tensor, at::Tensor>;
  class Split : public torch::nn::Module {
   public:
    Pair forward(const at::Tensor& x, int scale) { return {x.sin() * scale, x.cos()}; }
  };
  class Stacked : public torch::nn::Module {
   public:
    Tensors forward(const Pair& xs) { return {std::get<0>(xs).exp(), std::get<1>(xs).exp()}; }
  };
  class Joined : public torch::nn::Module {
   public:
    at::Tensor forward(const Tensors& xs) { return at::stack(xs).sin().sum(); }
  };
  const auto x = at::randn({5}).requires_grad_();
  const auto gradient = [&](bool wrapped) {
    torch::nn::Sequential model{Split(), Stacked(), Joined()};
    if (wrapped) wrap_activation_checkpointing(*model, blocks_of<Split, Stacked, Joined>());
    x.mutable_grad().reset();
    model->forward(x, 3).backward();
    return x.grad();
  };
  const auto expected = gradient(false);
  EXPECT_TRUE(expected.equal(gradient(true)));
}

TEST(WrapActivationCheckpointing, RecomputesBlocksOfABlockList) {
  auto plain = std::make_shared<Stack<torch::nn::ModuleList>>(4);
  const auto expected = trained(plain, 6);
  auto model = std::make_shared<Stack<BlockList>>(4);
  EXPECT_EQ(model->named_parameters().keys(), plain->named_parameters().keys());
  expect_equal(expected, trained(model, 6));
  EXPECT_EQ(runs, (std::vector{2, 2, 2, 2}));

  auto recomputed = std::make_shared<Stack<BlockList>>(4);
  wrap_activation_checkpointing(*recomputed, blocks_of<BlockImpl>());
  expect_equal(expected, trained(recomputed, 6));
  EXPECT_EQ(runs, (std::vector{4, 4, 4, 4}));

  const auto copy = std::dynamic_pointer_cast<BlockListImpl>(recomputed->blocks->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(copy->recomputes(3));
}

TEST(BlockList, CallsABlockAgainWithWhatItReadTheFirstTime) {
  class Reader : public torch::nn::Module {
   public:
    explicit Reader(std::shared_ptr<int> number) : number(std::move(number)) {}
    at::Tensor forward(const at::Tensor& x) { return (x * *number).exp().sin(); }
    std::shared_ptr<int> number;
  };
  const auto number = std::make_shared<int>(2);
  BlockList blocks(
      activations::Snapshot([number] { return [number, then = *number] { *number = then; }; }));
  blocks->push_back(std::make_shared<Reader>(number));
  const auto x = at::randn({5}).requires_grad_();
  blocks->call<Reader>(0, x).sum().backward();
  const auto expected = x.grad().clone();

  blocks->set_recomputed(0);
  x.mutable_grad().reset();
  const auto y = blocks->call<Reader>(0, x);
  *number = 3;
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(expected));
  EXPECT_EQ(*number, 3);
}

TEST(WrapActivationCheckpointing, RefusesWhatItCannotReach) {
  auto model = std::make_shared<Stack<torch::nn::ModuleList>>(3);
  auto text = usage_error([&] { wrap_activation_checkpointing(*model, blocks_of<BlockImpl>()); });
  EXPECT_NE(text.find("'blocks.0' cannot be recomputed from outside"), std::string::npos) << text;
  EXPECT_NE(text.find("lockstep::recompute(block, x)"), std::string::npos) << text;
  // Only one of the two can be reached, so neither is changed.
  torch::nn::Sequential both(Block(0), Head());
  text = usage_error(
      [&] { wrap_activation_checkpointing(*both, blocks_of<BlockImpl, torch::nn::LinearImpl>()); });
  EXPECT_NE(text.find("'0.linear'"), std::string::npos) << text;
  auto only = torch::nn::Sequential(both->ptr<BlockImpl>(0));
  trained(only, 6);
  EXPECT_EQ(runs, (std::vector{2}));
}

TEST(WrapActivationCheckpointing, RefusesAPolicyThatChoosesNothing) {
  auto model = blocks_and_head(3);
  auto policy = blocks_of<BlockImpl>();
  policy.every = 4;
  const auto text = usage_error([&] { wrap_activation_checkpointing(*model, policy); });
  EXPECT_NE(text.find("3 of the modules"), std::string::npos) << text;
}

TEST(SelectiveGradientCheckpointing, SpreadsAShareOfTheBlocks) {
  const auto runs_at = [](double ratio) {
    auto model = blocks_and_head(8);
    const SelectiveGradientCheckpointing chosen(*model, ratio);
    EXPECT_EQ(chosen.num_blocks(), 8u);
    trained(model, 4);
    return runs;
  };
  EXPECT_EQ(runs_at(0.0), (std::vector{2, 2, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(runs_at(0.25), (std::vector{2, 2, 2, 4, 2, 2, 2, 4}));
  EXPECT_EQ(runs_at(0.5), (std::vector{2, 4, 2, 4, 2, 4, 2, 4}));
  EXPECT_EQ(runs_at(0.7), (std::vector{2, 4, 4, 4, 2, 4, 4, 4}));
  EXPECT_EQ(runs_at(1.0), (std::vector{4, 4, 4, 4, 4, 4, 4, 4}));
}

TEST(SelectiveGradientCheckpointing, HasTheBitsOfAPlainRun) {
  auto plain = blocks_and_head(5);
  auto model = blocks_and_head(5);
  EXPECT_EQ(SelectiveGradientCheckpointing(*model, 0.6).num_recomputed(), 3u);
  expect_equal(trained(plain, 4), trained(model, 4));
}

TEST(SelectiveGradientCheckpointing, RefusesWhatItCannotDo) {
  auto model = blocks_and_head(2);
  EXPECT_NE(usage_error([&] { SelectiveGradientCheckpointing(*model, 1.5); }).find("is 1.5"),
            std::string::npos);
  torch::nn::Sequential layers(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  EXPECT_NE(usage_error([&] {
              SelectiveGradientCheckpointing(*layers, 0.5);
            }).find("wrap_activation_checkpointing(model, policy)"),
            std::string::npos);
  auto list = std::make_shared<Stack<torch::nn::ModuleList>>(3);
  EXPECT_NE(usage_error([&] { SelectiveGradientCheckpointing(*list, 1.0); }).find("BlockList"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep
