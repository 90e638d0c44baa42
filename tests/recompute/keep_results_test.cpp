#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/autograd.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/device/live_bytes.h>
#include <lockstep/recompute/keep_results.h>
#include <lockstep/recompute/recompute.h>

#include "../base/errors.h"
#include "expect_equal.h"

namespace lockstep {
namespace {

// Counts how often operators of a name run on this thread.
class Count {
 public:
  explicit Count(std::string name)
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&Count::see))) {
    wanted() = std::move(name);
    seen() = 0;
  }
  ~Count() { at::removeCallback(handle_); }
  Count(const Count&) = delete;
  Count& operator=(const Count&) = delete;

  int value() const { return seen(); }

 private:
  static std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& function) {
    if (function.name() == wanted()) ++seen();
    return nullptr;
  }
  static std::string& wanted() {
    static std::string name;
    return name;
  }
  static int& seen() {
    static int count = 0;
    return count;
  }

  at::CallbackHandle handle_;
};

struct LayersAndConvolution {
  torch::nn::Linear first{7, 11};
  torch::nn::Linear second{11, 7};
  torch::nn::Conv1d convolution{torch::nn::Conv1dOptions(3, 3, 3).padding(1)};
  torch::nn::Dropout dropout{0.4};

  // Takes and returns [3, 3, 7].
  at::Tensor operator()(const at::Tensor& x) {
    const auto linear = [](const torch::nn::Linear& layer, const at::Tensor& x) {
      return at::linear(x, layer->weight, layer->bias);
    };
    const auto y = dropout(linear(second, dropout(at::gelu(linear(first, x))))).tanh();
    const auto scores = at::matmul(y, y.transpose(-1, -2)).softmax(-1);
    return x + convolution(at::matmul(dropout(scores), y)).sin();
  }
  Tensors parameters() const {
    return {first->weight, first->bias,         second->weight,
            second->bias,  convolution->weight, convolution->bias};
  }
};

// Results, gradients, the next random numbers, and the number of a layer's products that backward
// computed.
struct KeptOutcome {
  Tensors values;
  int layers_in_backward = 0;
};

template <typename Call>
KeptOutcome kept_outcome(const Call& call) {
  at::manual_seed(2);
  LayersAndConvolution layers;
  const auto x = at::randn({3, 3, 7}).requires_grad_();
  const auto y = call(layers, call(layers, x * 2));
  const Count count("aten::addmm");
  y.square().sum().backward();
  KeptOutcome found{{y, x.grad(), at::rand({3})}, count.value()};
  for (const auto& parameter : layers.parameters()) found.values.push_back(parameter.grad());
  return found;
}

KeptOutcome kept(activations::OperationKinds kinds) {
  return kept_outcome([&](const LayersAndConvolution& layers, const at::Tensor& x) {
    const KeepResults keep(kinds);
    return recompute(layers, x);
  });
}

TEST(KeepResults, HasTheBitsOfAPlainRunAndComputesNoKeptResultAgain) {
  const auto plain =
      kept_outcome([](LayersAndConvolution layers, const at::Tensor& x) { return layers(x); });
  const auto none = kept({});
  const auto products = kept({OperationKind::matrix_product});
  const auto both = kept({OperationKind::matrix_product, OperationKind::convolution});
  EXPECT_EQ(plain.layers_in_backward, 0);
  EXPECT_EQ(none.layers_in_backward, 4);
  EXPECT_EQ(products.layers_in_backward, 0);
  EXPECT_EQ(both.layers_in_backward, 0);
  for (const auto& found : {none, products, both}) expect_equal(plain.values, found.values);
}

// The operation is no operator of LibTorch, saves a tensor of its own and draws random numbers.
TEST(KeepResults, TakesInOperationsOfOnesOwn) {
  int calls = 0;
  const auto fn = [&](const at::Tensor& x) {
    const auto y = activations::operation(
        OperationKind::attention,
        [&](const at::Tensor& a, const at::Tensor& b) {
          ++calls;
          return (a.exp() * at::rand({5}) * b.t().reshape({-1})).sin();
        },
        x.cos(), x.sin());
    return y * at::rand({5});
  };
  const auto run = [&](const auto& call) {
    at::manual_seed(2);
    calls = 0;
    const auto x = at::randn({5}).requires_grad_();
    const auto y = call(x);
    y.sum().backward();
    return Tensors{y, x.grad(), at::rand({3})};
  };
  const auto plain = run(fn);
  expect_equal(plain, run([&](const at::Tensor& x) { return recompute(fn, x); }));
  EXPECT_EQ(calls, 2);
  expect_equal(plain, run([&](const at::Tensor& x) {
                 const KeepResults keep({OperationKind::attention});
                 return recompute(fn, x);
               }));
  EXPECT_EQ(calls, 1);
}

TEST(KeepResults, KeepsResultsAndNotTheInputs) {
  const auto weight = at::randn({64, 64}).requires_grad_();
  const auto x = at::randn({32, 64}).requires_grad_();
  constexpr std::int64_t kBytes = 32 * 64 * 4;
  const auto bytes = [&](const activations::OperationKinds& kinds) {
    const device::LiveBytes memory(at::kCPU);
    const KeepResults keep(kinds);
    // Without recomputation, the product's input and the result of each other function would be
    // saved.
    const auto y = recompute(
        [&](const at::Tensor& x) { return x.exp().tanh().mm(weight).exp().tanh().sin().sum(); }, x);
    return memory.now();
  };
  EXPECT_LT(bytes({}), kBytes);
  const auto found = bytes({OperationKind::matrix_product});
  EXPECT_GE(found, kBytes);
  EXPECT_LT(found, 2 * kBytes);
}

TEST(KeepResults, GoesBackwardTwice) {
  const auto weight = at::randn({4, 4}).requires_grad_();
  const auto x = at::randn({3, 4}).requires_grad_();
  const auto fn = [&](const at::Tensor& x) { return at::linear(x.exp(), weight).sin(); };
  const auto gradients = [&](const at::Tensor& y) {
    weight.mutable_grad().reset();
    x.mutable_grad().reset();
    y.sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();
    return Tensors{weight.grad(), x.grad()};
  };
  const auto expected = gradients(fn(x));
  const KeepResults keep({OperationKind::matrix_product});
  expect_equal(expected, gradients(recompute(fn, x)));
}

TEST(KeepResults, ComputesAResultAgainThatIsChangedInPlace) {
  const auto weight = at::randn({4, 4}).requires_grad_();
  const auto x = at::randn({3, 4}).requires_grad_();
  const auto fn = [&](const at::Tensor& x) {
    return x.exp().mm(weight).add_(1).exp().mm(weight).sin();
  };
  const auto gradients = [&](const at::Tensor& y) {
    weight.mutable_grad().reset();
    x.mutable_grad().reset();
    y.sum().backward();
    return Tensors{weight.grad(), x.grad()};
  };
  const auto expected = gradients(fn(x));
  const KeepResults keep({OperationKind::matrix_product});
  expect_equal(expected, gradients(recompute(fn, x)));
}

TEST(KeepResults, RefusesToGoBackwardWithinTheFunction) {
  const auto weight = at::randn({4, 4}).requires_grad_();
  const KeepResults keep({OperationKind::matrix_product});
  const auto y = recompute(
      [&](const at::Tensor& x) {
        const auto inner = x.detach().requires_grad_();
        const auto g = torch::autograd::grad({(inner * inner).mm(weight).exp().sum()}, {inner})[0];
        return (x * g).exp();
      },
      at::randn({3, 4}).requires_grad_());
  const auto text = usage_error([&] { y.sum().backward(); });
  EXPECT_NE(text.find("goes backward through a result that was kept"), std::string::npos) << text;
}

}  // namespace
}  // namespace lockstep
