#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <lockstep/nn/layers/activations.h>

#include "../base/errors.h"
#include "compare.h"

namespace lockstep::nn {
namespace {

using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// GELU and its derivative in float64, in forms that do not cancel.
struct Reference {
  GeluKind kind;

  static double below(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
  static double inner(double x) { return 2.0 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x); }
  static double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

  double value(double x) const {
    return x * (kind == GeluKind::erf ? below(x) : sigmoid(inner(x)));
  }
  double slope(double x) const {
    if (kind == GeluKind::erf) return below(x) + x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI);
    const double steep = 2.0 * std::sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
    return sigmoid(inner(x)) + x * sigmoid(inner(x)) * sigmoid(-inner(x)) * steep;
  }
};

// Dense around 0, and then up to both ends of a float's range.
at::Tensor whole_range() {
  const auto near = at::linspace(-16.0, 16.0, 200001, at::TensorOptions(at::kFloat));
  const auto magnitudes =
      at::logspace(-44.5, 38.0, 4001, 10.0, at::TensorOptions(at::kDouble)).to(at::kFloat);
  return at::cat({near, magnitudes, -magnitudes, at::zeros({1}, at::kFloat)});
}

class Gelu : public testing::TestWithParam<GeluKind> {};

TEST_P(Gelu, IsAccurateOverTheWholeRange) {
  const Reference reference{GetParam()};
  auto x = whole_range().requires_grad_();
  const auto y = gelu(x, GetParam());
  const auto slopes = torch::autograd::grad({y}, {x}, {at::ones_like(y)})[0];
  double worst_value = 0.0, worst_slope = 0.0;
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double at = x.data_ptr<float>()[i];
    const double value = reference.value(at);
    // The error is relative to the value, down to a hundredth of x: below that, the rounding of an
    // exponent's argument dominates.
    const double size = std::max(std::abs(value), std::abs(at) / 100.0) + 1e-60;
    // Allows one smallest float, the closest that a float can be.
    const double error = std::abs(y.data_ptr<float>()[i] - value) - 1.5e-45;
    worst_value = std::max(worst_value, error / size);
    if (std::abs(at) < 1e18)
      worst_slope =
          std::max(worst_slope, std::abs(slopes.data_ptr<float>()[i] - reference.slope(at)));
  }
  EXPECT_LE(worst_value, 1e-6);
  EXPECT_LE(worst_slope, 1e-6);
}

TEST_P(Gelu, HasTheRightLimits) {
  auto x = at::tensor({kInfinity, -kInfinity, std::nan(""), 0.0}).to(at::kFloat).requires_grad_();
  const auto y = gelu(x, GetParam());
  EXPECT_EQ(y[0].item<double>(), kInfinity);
  EXPECT_NEAR(y[1].item<double>(), 0.0, 1e-30);
  EXPECT_TRUE(std::isnan(y[2].item<double>()));
  EXPECT_EQ(y[3].item<double>(), 0.0);
  const auto slopes = torch::autograd::grad({y}, {x}, {at::ones_like(y)})[0];
  EXPECT_EQ(slopes[0].item<double>(), 1.0);
  EXPECT_NEAR(slopes[1].item<double>(), 0.0, 1e-30);
  EXPECT_TRUE(std::isnan(slopes[2].item<double>()));
  EXPECT_EQ(slopes[3].item<double>(), 0.5);
}

TEST_P(Gelu, TakesAnyShapeTypeAndLayout) {
  const auto kind = GetParam();
  const auto reference = [&](const Tensors& in) {
    return at::gelu(in[0], kind == GeluKind::tanh ? "tanh" : "none");
  };
  const auto ours = [&](const Tensors& in) { return gelu(in[0], kind); };
  expect_matches(ours, reference, {random({3, 5, 7})}, 1e-6, "odd");
  expect_matches(ours, reference, {at::zeros({0, 4}, at::kFloat)}, 1e-6, "empty");
  expect_matches(ours, reference, {random({6, 4}).t()}, 1e-6, "transposed");
  expect_matches(ours, reference, {random({33}).to(at::kDouble)}, 1e-12, "double");
  // The gradient of a sum is one number, expanded to the shape.
  auto x = random({5, 5}).requires_grad_();
  gelu(x, kind).sum().backward();
  auto plain = x.detach().requires_grad_();
  reference({plain}).sum().backward();
  expect_close(x.grad(), plain.grad(), 1e-6, "sum");
}

TEST_P(Gelu, GivesTheSameBitsOnAnyNumberOfThreads) {
  const auto x = random({3, 33333}, 3.0);
  expect_repeatable([&](const Tensors& in) { return gelu(in[0], GetParam()); }, {x},
                    at::randn({3, 33333}), "gelu");
}

TEST_P(Gelu, RefusesASecondDerivative) {
  EXPECT_THAT(double_backward_error([&](const Tensors& in) { return gelu(in[0], GetParam()); },
                                    {random({4})}),
              HasSubstr("nn::gelu has no second derivative"));
}

TEST_P(Gelu, WorksOnCuda) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA";
  const auto kind = GetParam();
  expect_matches(
      [&](const Tensors& in) { return gelu(in[0], kind); },
      [&](const Tensors& in) { return at::gelu(in[0], kind == GeluKind::tanh ? "tanh" : "none"); },
      {random({3, 5}).cuda()}, 1e-6, "cuda");
}

INSTANTIATE_TEST_SUITE_P(Kinds, Gelu, testing::Values(GeluKind::tanh, GeluKind::erf),
                         [](const auto& kind) {
                           return kind.param == GeluKind::tanh ? "tanh" : "erf";
                         });

at::Tensor plain_silu_multiply(const Tensors& in) { return at::silu(in[0]) * in[1]; }
at::Tensor our_silu_multiply(const Tensors& in) { return silu_multiply(in[0], in[1]); }

TEST(SiluMultiply, MatchesTheCompositionInFloat64) {
  const auto check = [](Tensors inputs, const std::string& what) {
    expect_matches(our_silu_multiply, plain_silu_multiply, inputs, 1e-6, what);
  };
  check({random({3, 5, 7}, 3.0), random({3, 5, 7})}, "odd");
  check({at::linspace(-85.0, 85.0, 5001, at::kFloat), random({5001})}, "far");
  check({at::zeros({0, 3}, at::kFloat), at::zeros({0, 3}, at::kFloat)}, "empty");
  const auto both = random({6, 8});
  check({both.narrow(1, 0, 4), both.narrow(1, 4, 4)}, "halves of one projection");
  if (at::hasCUDA()) check({random({3, 5}).cuda(), random({3, 5}).cuda()}, "cuda");
}

TEST(SiluMultiply, HasFiniteGradientsFarFromZero) {
  auto gate = at::tensor({kInfinity, -1e30, 1e30, -100.0, 0.0}).to(at::kFloat).requires_grad_();
  const auto up = at::ones({5}, at::kFloat);
  const auto y = silu_multiply(gate, up);
  EXPECT_TRUE(at::equal(y.narrow(0, 0, 3), at::tensor({kInfinity, -0.0, 1e30}).to(at::kFloat)));
  const auto slopes = torch::autograd::grad({y}, {gate}, {up})[0];
  EXPECT_TRUE(at::allclose(slopes, at::tensor({1.0, 0.0, 1.0, 0.0, 0.5}).to(at::kFloat)));
}

TEST(SiluMultiply, GivesTheSameBitsOnAnyNumberOfThreads) {
  expect_repeatable(our_silu_multiply, {random({77777}, 3.0), random({77777})}, at::randn({77777}),
                    "silu_multiply");
}

TEST(SiluMultiply, RefusesWhatItCannotDo) {
  EXPECT_THAT(double_backward_error(our_silu_multiply, {random({4}), random({4})}),
              HasSubstr("nn::silu_multiply has no second derivative"));
  EXPECT_THAT(usage_error([] {
                silu_multiply(random({4, 3}), random({4}));
              }),
              HasSubstr("gate has the shape 4x3 and up 4"));
}

}  // namespace
}  // namespace lockstep::nn
