#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/version.h>

#include <lockstep/recompute/recompute.h>

#include "../base/errors.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || a.equal(b));
}

at::Tensor random_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

// Two layers with dropout after each.
struct Layers {
  torch::nn::Linear first{7, 11};
  torch::nn::Linear second{11, 7};
  torch::nn::Dropout dropout{0.4};

  Layers() {
    at::manual_seed(3);
    for (const auto& parameter : parameters()) {
      const c10::NoGradGuard no_grad;
      parameter.normal_();
    }
  }
  Tensors parameters() const { return {first->weight, first->bias, second->weight, second->bias}; }
  at::Tensor operator()(const at::Tensor& x) {
    return dropout(second(dropout(at::gelu(first(x)))).tanh());
  }
  // Returns the gradients and clears them.
  Tensors gradients() const {
    Tensors found;
    for (auto& parameter : parameters()) {
      found.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
      parameter.mutable_grad().reset();
    }
    return found;
  }
};

// The values that a run computes, all of which must have the same bits with recomputation.
struct Outcome {
  Tensors values;
  at::Tensor random_state;
};

void expect_same(const Outcome& expected, const Outcome& found) {
  ASSERT_EQ(expected.values.size(), found.values.size());
  for (std::size_t i = 0; i < expected.values.size(); ++i)
    EXPECT_TRUE(same(expected.values[i], found.values[i])) << i;
  EXPECT_TRUE(expected.random_state.equal(found.random_state));
}

// A test's computation on the layers and an input. It calls functions of one tensor through `call`,
// which runs them plainly or recomputes them.
using Function = std::function<at::Tensor(const at::Tensor&)>;
using Call = std::function<at::Tensor(const Function&, const at::Tensor&)>;
using Program = std::function<Tensors(Layers&, const at::Tensor&, const Call&)>;

at::Tensor plainly(const Function& fn, const at::Tensor& x) { return fn(x); }
at::Tensor recomputed(const Function& fn, const at::Tensor& x) { return recompute(fn, x); }

Outcome outcome(const Program& run, const Call& call, bool input_has_gradient = true) {
  Layers layers;
  const auto x = at::randn({5, 7}).requires_grad_(input_has_gradient);
  Outcome found;
  found.values = run(layers, x, call);
  found.values.push_back(x.grad());
  for (const auto& gradient : layers.gradients()) found.values.push_back(gradient);
  found.random_state = random_state();
  return found;
}

void expect_same_as_plain(const Program& run) {
  for (const bool input_has_gradient : {true, false})
    expect_same(outcome(run, plainly, input_has_gradient),
                outcome(run, recomputed, input_has_gradient));
}

TEST(Recompute, HasTheBitsOfAPlainRun) {
  expect_same_as_plain([](Layers& layers, const at::Tensor& x, const Call& call) {
    const auto y = call(layers, x);
    const auto z = call(layers, y * 2).sin();
    const auto random = at::rand({3});
    z.sum().backward();
    return Tensors{y, z, random, at::rand({3})};
  });
}

TEST(Recompute, CallsTheFunctionOnceMoreInBackward) {
  Layers layers;
  std::vector<bool> calls;
  const auto x = at::randn({5, 7}).requires_grad_();
  const auto y = recompute(
      [&](const at::Tensor& x) {
        calls.push_back(activations::is_recomputing());
        return layers(x);
      },
      x);
  EXPECT_EQ(calls, (std::vector{false}));
  y.sum().backward();
  EXPECT_EQ(calls, (std::vector{false, true}));
  EXPECT_FALSE(activations::is_recomputing());
}

TEST(Recompute, Nests) {
  expect_same_as_plain([](Layers& layers, const at::Tensor& x, const Call& call) {
    const auto y = call(
        [&](const at::Tensor& x) {
          const auto inner = call(layers, x.sin());
          return call([&](const at::Tensor& x) { return call(layers, x) * x; }, inner) + inner;
        },
        x);
    y.square().sum().backward();
    return Tensors{y};
  });
}

// Sums of gradients are made in the order of a plain run, even if a weight is used in several
// places and has a gradient already.
TEST(Recompute, AddsGradientsOfSharedWeightsInTheSameOrder) {
  expect_same_as_plain([](Layers& layers, const at::Tensor& x, const Call& call) {
    for (int pass = 0; pass < 3; ++pass) {
      auto y = x * (pass + 1);
      for (int i = 0; i < 4; ++i) y = y + call(layers, y);
      y.sum().backward();
    }
    return Tensors{};
  });
}

TEST(Recompute, FiresHooksOfParametersOnce) {
  Layers layers;
  int fired = 0;
  layers.first->weight.register_hook([&](const at::Tensor&) { ++fired; });
  auto y = recompute(layers, at::randn({5, 7}));
  y = recompute(layers, y);
  y.sum().backward();
  EXPECT_EQ(fired, 1);
}

TEST(Recompute, GivesGradientsToWhatTheFunctionCaptures) {
  expect_same_as_plain([](Layers& layers, const at::Tensor& x, const Call& call) {
    const auto captured = x.cos() * layers.first->weight.sum();
    const auto y = call([=](const at::Tensor& x) { return (x * captured).exp(); }, x);
    y.sum().backward();
    return Tensors{y};
  });
}

TEST(Recompute, AsksForGradientsOfSomeInputs) {
  const Program run = [](Layers& layers, const at::Tensor& x, const Call& call) {
    const auto y = call(layers, x);
    return torch::autograd::grad({y.sum()}, {layers.first->bias});
  };
  const auto found = outcome(run, recomputed);
  EXPECT_TRUE(found.values[0].any().item<bool>());
  expect_same(outcome(run, plainly), found);
}

TEST(Recompute, HasGradientsOfGradients) {
  expect_same_as_plain([](Layers& layers, const at::Tensor& x, const Call& call) {
    const auto y = call(layers, x);
    const auto gradient = torch::autograd::grad({y.square().sum()}, {layers.first->weight}, {},
                                                /*retain_graph=*/true, /*create_graph=*/true)[0];
    (gradient.square().sum() + y.sum()).backward();
    return Tensors{gradient};
  });
}

TEST(Recompute, GoesBackwardTwice) {
  expect_same_as_plain([](Layers& layers, const at::Tensor& x, const Call& call) {
    const auto y = call(layers, x).sum();
    y.backward({}, /*retain_graph=*/true);
    y.backward();
    EXPECT_THROW(y.backward(), c10::Error);
    return Tensors{};
  });
}

TEST(Recompute, GoesBackwardWithinTheFunction) {
  expect_same_as_plain([](Layers& layers, const at::Tensor& x, const Call& call) {
    const auto y = call(
        [&](const at::Tensor& x) {
          const auto inner = x.detach().requires_grad_();
          return layers(x) * torch::autograd::grad({layers(inner).square().sum()}, {inner})[0];
        },
        x);
    y.sum().backward();
    return Tensors{y};
  });
}

TEST(Recompute, TakesAndReturnsWhatTheFunctionDoes) {
  Layers layers;
  struct Result {
    at::Tensor sum;
    std::vector<at::Tensor> parts;
    int count;
  };
  const auto fn = [&](const std::tuple<at::Tensor, int>& scaled, const std::vector<at::Tensor>& xs,
                      const std::optional<at::Tensor>& mask, const at::Tensor& none) {
    EXPECT_FALSE(none.defined());
    auto x = std::get<at::Tensor>(scaled) * std::get<int>(scaled);
    for (const auto& other : xs) x = x + layers(other);
    return Result{(x * *mask).sum(), {x.sin(), x.cos()}, static_cast<int>(xs.size())};
  };
  const auto run = [&](const auto& call) {
    at::manual_seed(8);
    const Tensors inputs = {at::randn({5, 7}).requires_grad_(), at::randn({5, 7}).requires_grad_(),
                            at::randn({5, 7})};
    const auto mask = at::rand({5, 7}).gt(0.5);
    const Result result = call(fn, std::tuple(inputs[0], 3), Tensors{inputs[1], inputs[2]},
                               std::optional(mask), at::Tensor());
    EXPECT_EQ(result.count, 2);
    // One of the outputs is not used.
    (result.sum + result.parts[0].prod()).backward();
    Tensors values = {result.sum, result.parts[0], result.parts[1], inputs[0].grad(),
                      inputs[1].grad()};
    for (const auto& gradient : layers.gradients()) values.push_back(gradient);
    return Outcome{values, random_state()};
  };
  expect_same(run([](const auto& fn, const auto&... inputs) { return fn(inputs...); }),
              run([](const auto& fn, const auto&... inputs) { return recompute(fn, inputs...); }));
}

TEST(Recompute, IsAPlainCallWithoutGradMode) {
  Layers layers;
  const c10::NoGradGuard no_grad;
  const auto y = recompute(layers, at::randn({5, 7}));
  EXPECT_FALSE(y.requires_grad());
}

TEST(Recompute, LeavesWhatNeedsNoGradientAlone) {
  const auto x = at::randn({5, 7});
  const auto y = recompute([](const at::Tensor& x) { return x.exp(); }, x);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(y.equal(x.exp()));
}

void set_autocast(bool on) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  at::autocast::set_autocast_enabled(at::kCPU, on);
#else
  at::autocast::set_cpu_enabled(on);
#endif
  if (!on) at::autocast::clear_cache();
}

TEST(Recompute, RunsAgainUnderTheSameAutocast) {
  const Program run = [](Layers&, const at::Tensor& x, const Call& call) {
    // Autocast computes losses in float, which can be tested on every CPU; products in 16 bits
    // cannot.
    std::vector<at::ScalarType> types;
    set_autocast(true);
    const auto y = call(
        [&](const at::Tensor& x) {
          const auto loss = at::mse_loss(x.to(at::kBFloat16), at::zeros({5, 7}, at::kBFloat16));
          types.push_back(loss.scalar_type());
          return loss.exp();
        },
        x);
    set_autocast(false);
    y.sum().backward();
    for (const auto type : types) EXPECT_EQ(type, at::kFloat);
    return Tensors{y};
  };
  expect_same(outcome(run, plainly), outcome(run, recomputed));
}

TEST(Recompute, PutsBackBuffersOfAModule) {
  const auto run = [](bool again) {
    at::manual_seed(4);
    torch::nn::Sequential model(torch::nn::Linear(7, 7), torch::nn::BatchNorm1d(7),
                                torch::nn::Dropout(0.2));
    Tensors values;
    for (int step = 0; step < 3; ++step) {
      // Two micro-batches are under way at the same time.
      const auto x = at::randn({6, 7}), y = at::randn({6, 7});
      const auto a = again ? recompute(model, x) : model->forward(x);
      const auto b = again ? recompute(model, y) : model->forward(y);
      (a.square().sum() + b.exp().sum()).backward();
      for (const auto& parameter : model->parameters()) values.push_back(parameter.grad().clone());
      for (const auto& buffer : model->buffers()) values.push_back(buffer.clone());
    }
    return Outcome{values, random_state()};
  };
  expect_same(run(false), run(true));
}

TEST(Recompute, FindsBuffersAsTheyWereTheFirstTime) {
  class Growing : public torch::nn::Module {
   public:
    Growing() : scale(register_buffer("scale", at::ones({}))) {}
    at::Tensor forward(const at::Tensor& x) {
      const auto y = (x * scale.clone()).exp();
      scale.add_(1);
      return y.sin();
    }
    at::Tensor scale;
  };
  const auto run = [](const auto& call) {
    at::manual_seed(4);
    auto model = std::make_shared<Growing>();
    const auto x = at::randn({5, 7}).requires_grad_();
    const auto y = call(model, call(model, x));
    y.sum().backward();
    return Outcome{{y, x.grad(), model->scale}, random_state()};
  };
  expect_same(run([](const auto& model, const auto& x) { return model->forward(x); }),
              run([](const auto& model, const auto& x) { return recompute(model, x); }));
}

TEST(Recompute, EndsTheSecondCallWhenBackwardHasWhatItNeeds) {
  int begun = 0, ended = 0;
  const auto x = at::randn({5, 7}).requires_grad_();
  const auto y = recompute(
      [&](const at::Tensor& x) {
        ++begun;
        const auto y = x.sin().exp();
        ++ended;
        return y + 1;
      },
      x);
  y.sum().backward();
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 1);
}

TEST(Recompute, RefusesAFunctionThatChangesItsInput) {
  const auto x = at::randn({5, 7}).requires_grad_() * 2;
  const auto text =
      usage_error([&] { recompute([](const at::Tensor& x) { return x.relu_().exp(); }, x); });
  EXPECT_NE(text.find("changed its input 0 of shape [5, 7] in place"), std::string::npos) << text;
}

TEST(Recompute, RefusesAnInputThatIsChangedLater) {
  const auto leaf = at::randn({5, 7}).requires_grad_();
  auto x = leaf * 2;
  const auto y = recompute([](const at::Tensor& x) { return x.exp().sin(); }, x);
  x.add_(1);
  try {
    y.sum().backward();
    FAIL() << "the input's new value was used";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"), std::string::npos)
        << error.what();
  }
}

TEST(Recompute, RefusesAParameterThatIsChangedBeforeBackward) {
  Layers layers;
  const auto y = recompute(layers, at::randn({5, 7}));
  {
    const c10::NoGradGuard no_grad;
    layers.second->weight.mul_(0.5);
  }
  const auto text = usage_error([&] { y.sum().backward(); });
  EXPECT_NE(text.find("step the optimizer after backward"), std::string::npos) << text;
}

TEST(Recompute, RefusesAFunctionThatDoesSomethingElseTheSecondTime) {
  const auto x = at::randn({5, 7}).requires_grad_();
  const auto shorter = recompute(
      [](const at::Tensor& x) {
        return activations::is_recomputing() ? x.exp() : x.exp().sin().exp();
      },
      x);
  auto text = usage_error([&] { shorter.sum().backward(); });
  EXPECT_NE(text.find("saved 1 tensors for backward, and 3 the first time"), std::string::npos)
      << text;
  const auto other = recompute(
      [](const at::Tensor& x) {
        return activations::is_recomputing() ? x.slice(0, 0, 4).exp().sum() : x.exp().sum();
      },
      x);
  text = usage_error([&] { other.backward(); });
  EXPECT_NE(text.find("[4, 7] of Float for backward where it saved [5, 7] of Float"),
            std::string::npos)
      << text;
}

TEST(Recompute, PutsTheRandomNumbersBackWhereTheFunctionThrows) {
  const auto x = at::randn({5, 7}).requires_grad_();
  const auto y = recompute(
      [](const at::Tensor& x) {
        const auto noise = at::rand({5, 7});
        if (activations::is_recomputing()) throw std::runtime_error("no more");
        return (x * noise).exp();
      },
      x);
  const auto before = random_state();
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  EXPECT_TRUE(random_state().equal(before));
  EXPECT_FALSE(activations::is_recomputing());
}

}  // namespace
}  // namespace lockstep
