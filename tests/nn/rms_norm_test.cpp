#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/nn/layers/norms.h>

namespace lockstep::nn {
namespace {

TEST(RMSNorm, DividesByTheRootMeanSquare) {
  RMSNorm norm(3, 0.5);
  {
    const c10::NoGradGuard no_grad;
    norm->weight.copy_(at::tensor({1.0, 2.0, -1.0}));
  }
  const auto y = norm->forward(at::tensor({1.0f, 2.0f, 3.0f, 0.0f, 0.0f, 0.0f}).view({2, 3}));
  const double root = std::sqrt(14.0 / 3 + 0.5);
  const auto expected = at::tensor({1 / root, 4 / root, -3 / root, 0.0, 0.0, 0.0}).view({2, 3});
  EXPECT_TRUE(y.allclose(expected.to(at::kFloat), 1e-6));
}

TEST(RMSNorm, HasTheGradientOfItsFormula) {
  RMSNorm norm(5, 1e-3);
  norm->to(at::kDouble);
  auto x = at::randn({2, 5}, at::kDouble).requires_grad_();
  const auto along = at::randn({2, 5}, at::kDouble);
  const auto value = [&](const at::Tensor& at) { return norm->forward(at).mul(along).sum(); };
  value(x).backward();
  const c10::NoGradGuard no_grad;
  for (std::int64_t i = 0; i < 10; ++i) {
    auto step = at::zeros({10}, at::kDouble);
    step[i] = 1e-6;
    const auto slope = (value(x + step.view({2, 5})) - value(x - step.view({2, 5}))) / 2e-6;
    EXPECT_NEAR(x.grad().view(-1)[i].item<double>(), slope.item<double>(), 1e-7);
  }
}

// Squares of 16-bit numbers overflow, and their means lose digits.
TEST(RMSNorm, Normalises16BitsInFloat) {
  RMSNorm norm(4, 1e-6);
  norm->to(at::kHalf);
  const auto y = norm->forward(at::full({1, 4}, 1000.0, at::kHalf));
  EXPECT_EQ(y.scalar_type(), at::kHalf);
  EXPECT_TRUE(y.to(at::kFloat).equal(at::ones({1, 4})));
}

}  // namespace
}  // namespace lockstep::nn
