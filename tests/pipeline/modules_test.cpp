// LibTorch's modules of all kinds.
#include <torch/nn.h>

#include "two_halves.h"

namespace lockstep::pipeline {
namespace {

namespace nn = torch::nn;

using at::Tensor;

std::function<Tensor()> random_input(std::vector<std::int64_t> sizes, bool requires_grad = true) {
  return [=] { return at::randn(sizes).requires_grad_(requires_grad); };
}

Case<nn::SequentialImpl> sequential(std::function<nn::Sequential()> make,
                                    std::function<Tensor()> input) {
  return {[=] { return make().ptr(); }, std::move(input),
          [](nn::SequentialImpl& model, const Tensor& x) { return model.forward(x); }};
}

nn::Sequential mlp() {
  return nn::Sequential(nn::Linear(12, 24), nn::ReLU(),
                        nn::Linear(nn::LinearOptions(24, 24).bias(false)), nn::Tanh(),
                        nn::Linear(24, 7));
}

TEST(SplitModules, Mlp) {
  expect_halves_make_a_whole(sequential(mlp, random_input({5, 12})));
  expect_halves_make_a_whole(sequential(mlp, random_input({3, 5, 12})));
  expect_halves_make_a_whole(sequential(mlp, random_input({12})));
}

// This is the first stage of a pipeline.
TEST(SplitModules, MlpWhoseInputNeedsNoGradient) {
  expect_halves_make_a_whole(sequential(mlp, random_input({5, 12}, false)));
  expect_halves_make_a_whole(sequential(mlp, random_input({3, 5, 12}, false)));
}

TEST(SplitModules, MlpInDouble) {
  expect_halves_make_a_whole(sequential(
      [] {
        auto model = mlp();
        model->to(at::kDouble);
        return model;
      },
      [] {
        return at::randn({5, 12}, at::kDouble).requires_grad_();
      }));
}

TEST(SplitModules, Convolutions) {
  expect_halves_make_a_whole(sequential(
      [] {
        return nn::Sequential(nn::Conv1d(nn::Conv1dOptions(3, 6, 3).stride(2)), nn::GELU(),
                              nn::ConvTranspose1d(nn::ConvTranspose1dOptions(6, 4, 3)));
      },
      random_input({2, 3, 19})));
  expect_halves_make_a_whole(sequential(
      [] {
        return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), nn::BatchNorm2d(8),
                              nn::ReLU(),
                              nn::Conv2d(nn::Conv2dOptions(8, 8, 3).padding(1).groups(4)),
                              nn::Conv2d(nn::Conv2dOptions(8, 4, 3).dilation(2).bias(false)),
                              nn::Flatten(), nn::Linear(4 * 6 * 6, 5));
      },
      random_input({3, 3, 12, 12})));
  expect_halves_make_a_whole(sequential(
      [] {
        return nn::Sequential(nn::Conv3d(nn::Conv3dOptions(2, 4, 3)), nn::ReLU(),
                              nn::Conv3d(nn::Conv3dOptions(4, 3, 2)));
      },
      random_input({2, 2, 6, 6, 6}, false)));
}

TEST(SplitModules, TransformerEncoder) {
  expect_halves_make_a_whole(Case<nn::TransformerEncoderImpl>{
      [] {
        return nn::TransformerEncoder(
                   nn::TransformerEncoderOptions(
                       nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0.1),
                       2))
            .ptr();
      },
      random_input({6, 3, 16}),
      [](nn::TransformerEncoderImpl& model, const Tensor& x) { return model.forward(x); }});
}

TEST(SplitModules, MultiheadAttention) {
  const auto attend = [](nn::MultiheadAttentionImpl& model, const Tensor& x) {
    return std::get<0>(model.forward(x, x, x));
  };
  expect_halves_make_a_whole(Case<nn::MultiheadAttentionImpl>{
      [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(16, 4)).ptr(); },
      random_input({6, 3, 16}), attend});
  // There are three weights instead of parts of one, and a bias for keys and values.
  expect_halves_make_a_whole(Case<nn::MultiheadAttentionImpl>{
      [] {
        return nn::MultiheadAttention(
                   nn::MultiheadAttentionOptions(16, 4).kdim(8).vdim(8).add_bias_kv(true))
            .ptr();
      },
      random_input({6, 3, 16}),
      [](nn::MultiheadAttentionImpl& model, const Tensor& x) {
        return std::get<0>(model.forward(x, x.narrow(2, 0, 8), x.narrow(2, 8, 8)));
      }});
}

TEST(SplitModules, Recurrent) {
  expect_halves_make_a_whole(Case<nn::LSTMImpl>{
      [] { return nn::LSTM(nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true)).ptr(); },
      random_input({4, 3, 6}),
      [](nn::LSTMImpl& model, const Tensor& x) { return std::get<0>(model.forward(x)); }});
  expect_halves_make_a_whole(Case<nn::GRUImpl>{
      [] { return nn::GRU(nn::GRUOptions(6, 5)).ptr(); }, random_input({4, 3, 6}, false),
      [](nn::GRUImpl& model, const Tensor& x) { return std::get<0>(model.forward(x)); }});
}

TEST(SplitModules, FrozenParameters) {
  const auto freeze = [](std::vector<std::string> names) {
    return [=] {
      auto model = mlp();
      for (auto& item : model->named_parameters())
        for (const auto& name : names)
          if (item.key() == name) item.value().requires_grad_(false);
      return model;
    };
  };
  expect_halves_make_a_whole(sequential(freeze({"0.weight"}), random_input({5, 12})));
  expect_halves_make_a_whole(sequential(freeze({"0.weight", "0.bias"}), random_input({5, 12})));
  expect_halves_make_a_whole(
      sequential(freeze({"0.weight", "0.bias", "2.weight"}), random_input({5, 12}, false)));
  expect_halves_make_a_whole(sequential(freeze({"4.bias"}), random_input({3, 5, 12})));
}

// A table is looked up, multiplied with, and used in another way, so three sums meet.
struct Tied : nn::Module {
  nn::Embedding table = register_module("table", nn::Embedding(11, 8));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
  Tensor position = register_parameter("position", at::randn({9, 8}));
  Tensor scale = register_parameter("scale", at::randn({8, 8}));
  Tensor unused = register_parameter("unused", at::randn({3}));

  Tensor forward(const Tensor& tokens) {
    auto x = table->forward(tokens) + position.slice(0, 0, tokens.size(1));
    const auto turned = scale.t();  // used twice
    x = at::tanh(x.matmul(turned)).matmul(turned).matmul(scale);
    x = norm->forward(x) + (table->weight * table->weight).mean();
    return x.matmul(table->weight.t());
  }
};

TEST(SplitModules, SharedWeights) {
  expect_halves_make_a_whole(
      Case<Tied>{[] { return std::make_shared<Tied>(); },
                 [] {
                   return at::randint(0, 11, {2, 5});
                 },
                 [](Tied& model, const Tensor& tokens) { return model.forward(tokens); }});
}

// Weights are computed, cut, joined or cast before they are used.
struct Derived : nn::Module {
  Tensor direction = register_parameter("direction", at::randn({6, 8}));
  Tensor length = register_parameter("length", at::rand({6, 1}));
  Tensor left = register_parameter("left", at::randn({3, 6}));
  Tensor right = register_parameter("right", at::randn({5, 6}));
  Tensor both = register_parameter("both", at::randn({12, 8}));
  Tensor batch = register_parameter("batch", at::randn({8, 8}));
  Tensor wide = register_parameter("wide", at::randn({8, 8}, at::kDouble));

  Tensor forward(const Tensor& input) {
    auto x = at::linear(input, length * direction / direction.norm());
    x = at::linear(x, at::cat({left, right}));
    const auto parts = both.chunk(2);
    x = at::linear(x, parts[0]).mul(at::linear(x, parts[1]));
    x = at::linear(x, parts[0].t());
    x = at::bmm(x.unsqueeze(1), batch.expand({x.size(0), 8, 8})).squeeze(1);
    return at::linear(x, wide.to(at::kFloat));
  }
};

TEST(SplitModules, DerivedWeights) {
  const auto forward = [](Derived& model, const Tensor& x) { return model.forward(x); };
  const auto make = [] { return std::make_shared<Derived>(); };
  expect_halves_make_a_whole(Case<Derived>{make, random_input({4, 8}), forward});
  expect_halves_make_a_whole(Case<Derived>{make, random_input({4, 8}, false), forward});
  // The output is the parameter itself.
  expect_halves_make_a_whole(Case<Derived>{
      make, random_input({4, 8}), [](Derived& model, const Tensor&) { return model.wide.t(); }});
}

TEST(SplitModules, HooksOfActivationsAndWeights) {
  expect_halves_make_a_whole(Case<nn::SequentialImpl>{
      [] {
        auto model = mlp();
        model[2]->as<nn::Linear>()->weight.register_hook(
            [](const Tensor& gradient) { return gradient * 3; });
        return model.ptr();
      },
      random_input({5, 12}),
      [](nn::SequentialImpl& model, const Tensor& x) {
        auto y = model[0]->as<nn::Linear>()->forward(x);
        y.register_hook([](const Tensor& gradient) { return gradient * 2; });
        auto z = model[2]->as<nn::Linear>()->forward(y);
        z.retain_grad();
        return model[4]->as<nn::Linear>()->forward(z);
      }});
}

}  // namespace
}  // namespace lockstep::pipeline
