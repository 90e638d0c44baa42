// The halves of a backward pass: what each computes, keeps and refuses.
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include <lockstep/base/error.h>
#include <lockstep/device/live_bytes.h>

#include "counted.h"
#include "two_halves.h"

namespace lockstep::pipeline {
namespace {

namespace nn = torch::nn;

using at::Tensor;

nn::Sequential chain(int num_layers) {
  nn::Sequential layers;
  for (int i = 0; i < num_layers; ++i) {
    layers->push_back(nn::Linear(16, 16));
    layers->push_back(nn::Tanh());
  }
  return layers;
}

void expect_own_products(nn::Sequential& model, const Tensor& input, int first_half) {
  const SplitBackward split(*model);
  const auto output = model->forward(input);
  const Counted products("aten::mm");
  auto rest = split.backward_input({output}, {at::ones_like(output)});
  EXPECT_EQ(products.take(), first_half);
  EXPECT_FALSE(rest.empty());
  rest.run();
  EXPECT_EQ(products.take(), 5);
  rest.run();
  EXPECT_EQ(products.take(), 0);
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.grad().defined());
}

TEST(SplitBehaviour, EachHalfComputesItsOwnProducts) {
  auto model = chain(5);
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{4, 16}, {2, 4, 16}}) {
    expect_own_products(model, at::randn(sizes).requires_grad_(), 5);
    expect_own_products(model, at::randn(sizes), 4);  // as in a first stage
  }
}

TEST(SplitBehaviour, LookUpsWait) {
  nn::Embedding table(7, 4);
  const auto output = table->forward(at::randint(0, 7, {5}));
  const Counted calls("aten::embedding_dense_backward");
  auto rest = SplitBackward(*table).backward_input({output}, {at::ones_like(output)});
  EXPECT_EQ(calls.take(), 0);
  rest.run();
  EXPECT_EQ(calls.take(), 1);
}

TEST(SplitBehaviour, ConvolutionsToo) {
  nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(2, 3, 3)),
                       nn::Conv2d(nn::Conv2dOptions(3, 2, 3)));
  const auto output = model->forward(at::randn({1, 2, 8, 8}).requires_grad_());
  const Counted calls("aten::convolution_backward");
  auto rest = SplitBackward(*model).backward_input({output}, {at::ones_like(output)});
  EXPECT_EQ(calls.take(), 2);
  rest.run();
  EXPECT_EQ(calls.take(), 2);
}

TEST(SplitBehaviour, HooksOfParametersFireOnceAndInTheSecondHalf) {
  auto model = chain(3);
  model->push_back(nn::LayerNorm(nn::LayerNormOptions({16})));
  std::vector<int> fired(model->parameters().size());
  for (std::size_t i = 0; i < fired.size(); ++i)
    model->parameters()[i].register_hook([&fired, i](const Tensor& gradient) {
      ++fired[i];
      return gradient;
    });
  const auto output = model->forward(at::randn({2, 4, 16}).requires_grad_());
  auto rest = SplitBackward(*model).backward_input({output}, {at::ones_like(output)});
  EXPECT_THAT(fired, testing::Each(0));
  rest.run();
  EXPECT_THAT(fired, testing::Each(1));
}

// A tensor that is no parameter of the module gets the gradient that it would get in a whole pass.
TEST(SplitBehaviour, OthersGetTheirGradientsInTheFirstHalf) {
  auto model = chain(2);
  const auto input = at::randn({4, 16}).requires_grad_();
  const auto weight = at::randn({16, 16}).requires_grad_();
  const auto output = at::mm(model->forward(input), weight);
  auto rest = SplitBackward(*model).backward_input({output}, {at::ones_like(output)});
  EXPECT_TRUE(input.grad().defined());
  EXPECT_TRUE(weight.grad().defined());
  rest.run();
}

TEST(SplitBehaviour, SeveralOutputsAndNone) {
  auto model = chain(2);
  auto twin = chain(2);
  for (std::size_t i = 0; i < 4; ++i)
    twin->parameters()[i].data().copy_(model->parameters()[i].data());
  const auto input = at::randn({4, 16});
  const auto outputs = [&](nn::Sequential& layers) {
    const auto first = layers[0]->as<nn::Linear>()->forward(input);
    return std::vector<Tensor>{first, layers[2]->as<nn::Linear>()->forward(first.tanh()),
                               at::ones({3})};
  };
  const auto gradient = at::randn({4, 16});
  SplitBackward(*model).backward_input(outputs(model), {gradient, gradient * 2, Tensor()}).run();
  const auto wanted = outputs(twin);
  torch::autograd::backward({wanted[0], wanted[1]}, {gradient, gradient * 2});
  for (std::size_t i = 0; i < 4; ++i)
    expect_same_bits(model->parameters()[i].grad(), twin->parameters()[i].grad(), "a parameter");
  EXPECT_TRUE(SplitBackward(*model).backward_input({at::ones({3})}, {Tensor()}).empty());
}

TEST(SplitBehaviour, FirstHalfFreesWhatNoProductNeeds) {
  const nn::TransformerEncoder model(nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0.1), 4));
  const SplitBackward split(*model);
  const auto pass = [&](const device::LiveBytes* memory, std::int64_t* after) {
    // Enough tokens for activations to outweigh weights, and for attention's scores to outweigh
    // activations.
    const auto input = at::randn({96, 4, 32}).requires_grad_();
    const auto output = model.ptr()->forward(input).sum();
    if (memory != nullptr) after[0] = memory->now();
    auto rest = split.backward_input({output}, {Tensor()});
    if (memory != nullptr) after[1] = memory->now();
    rest.run();
    if (memory != nullptr) after[2] = memory->now();
  };
  pass(nullptr, nullptr);  // gradients exist, as in a training
  const device::LiveBytes memory(at::kCPU);
  std::int64_t after[3] = {};
  pass(&memory, after);
  EXPECT_LT(after[1] * 2, after[0]);
  // The output, the input and its gradient.
  EXPECT_LE(after[2], 2 * 96 * 4 * 32 * 4 + 64);
  EXPECT_EQ(memory.now(), 0);
}

TEST(SplitBehaviour, AnotherPassGoesOnAsIfThereWereNoSplit) {
  auto model = chain(2);
  auto rest = [&] {
    const auto output = model->forward(at::randn({4, 16}));
    return SplitBackward(*model).backward_input({output.sum()}, {Tensor()});
  }();
  model->forward(at::randn({4, 16})).sum().backward();
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.grad().defined());
  rest = {};  // it is never run
}

TEST(SplitBehaviour, RefusesWhatCannotBeRight) {
  auto model = chain(2);
  const SplitBackward split(*model);
  const auto input = at::randn({4, 16}).requires_grad_();
  EXPECT_THROW(split.backward_input({model->forward(input)}, {}).run(), UsageError);
  EXPECT_THROW(split.backward_input({model->forward(input)}, {Tensor()}).run(), UsageError);

  const auto output = model[0]->as<nn::Linear>()->forward(input);
  const auto gradient = at::ones_like(output);
  auto rest = split.backward_input({output}, {gradient});
  gradient.zero_();
  EXPECT_THROW(rest.run(), UsageError);
  EXPECT_TRUE(rest.empty());
}

}  // namespace
}  // namespace lockstep::pipeline
