// The operators that models of plain torch::nn call under autocast on CUDA, compared with float64
// and with LibTorch's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/functional/linear.h>

#include <lockstep/device/autocast.h>
#include <lockstep/nn/layers/autocast_operators.h>

#include "compare.h"

namespace lockstep::nn {
namespace {

using device::Autocast;
using testing::HasSubstr;
using testing::Not;

class AutocastOperators : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU here";
    register_autocast_operators();
  }
};

struct LogitType {
  at::ScalarType type;
  double rounding;
  const char* name;
};
constexpr LogitType kLogitTypes[] = {
    {at::kFloat, 1e-5, "float"}, {at::kHalf, 6e-4, "half"}, {at::kBFloat16, 4e-3, "bfloat16"}};

// The tolerance is relative to the largest expected value, however small.
void expect_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const at::Tensor reference = expected.detach().to(at::kCPU, at::kDouble);
  const at::Tensor error = (actual.detach().to(at::kCPU, at::kDouble) - reference).abs();
  EXPECT_LE(error.max().item<double>(), tolerance * reference.abs().max().item<double>()) << what;
}

std::string function_of(const at::Tensor& tensor) {
  return tensor.grad_fn() == nullptr ? "" : tensor.grad_fn()->name();
}

// ---- values += bias ----

TEST_F(AutocastOperators, BiasesAreLibTorchsToTheBit) {
  for (const auto type : {at::kHalf, at::kBFloat16})
    for (const std::int64_t width : {8, 24, 96, 768, 2304, 3072, 8 * 1257})
      for (const std::int64_t rows : {1, 3, 130, 1000}) {
        const std::string what = fmt::format("{} {} x {}", c10::toString(type), rows, width);
        const at::Tensor values = random({2, rows, width}).to(at::kCUDA, type).requires_grad_();
        const at::Tensor bias = random({width}, 3.0).cuda().requires_grad_();
        const at::Tensor expected = values.detach().clone().add_(bias.detach());
        const at::Tensor slope = random({2, rows, width}).to(at::kCUDA, type);
        at::Tensor sum = values.clone();
        {
          const Autocast cast(at::kCUDA, type);
          sum += bias;
        }
        EXPECT_THAT(function_of(sum), HasSubstr("AddBias")) << what;
        EXPECT_TRUE(sum.equal(expected)) << what;
        const auto gradients = torch::autograd::grad({sum}, {values, bias}, {slope});
        EXPECT_TRUE(gradients[0].equal(slope)) << what;
        expect_near(gradients[1], slope.to(at::kDouble).sum(at::IntArrayRef{0, 1}), 1e-5, what);
      }
}

TEST_F(AutocastOperators, LinearLayersOfSequences) {
  const at::Tensor x = random({3, 11, 40}).cuda(), weight = random({56, 40}).cuda();
  const at::Tensor bias = random({56}).cuda();
  const auto linear = [](const Tensors& in) {
    return torch::nn::functional::linear(in[0], in[1], in[2]);
  };
  const auto under_autocast = [&](const Tensors& in) {
    const Autocast cast(at::kCUDA, at::kBFloat16);
    const at::Tensor y = linear(in);
    EXPECT_THAT(function_of(y), HasSubstr("AddBias"));
    return y;
  };
  expect_matches(under_autocast, linear, {x, weight, bias}, 2e-2, "linear");
}

TEST_F(AutocastOperators, BiasesKnowWhatIsNotRecorded) {
  const at::Tensor values = random({2, 3, 16}).to(at::kCUDA, at::kBFloat16);
  const at::Tensor bias = random({16}).cuda().requires_grad_();
  const at::Tensor expected = values.clone().add_(bias.detach());
  const Autocast cast(at::kCUDA, at::kBFloat16);
  {
    const at::NoGradGuard no_grad;
    at::Tensor sum = values.clone();
    const auto version = sum._version();
    sum += bias;
    EXPECT_TRUE(sum.equal(expected));
    EXPECT_FALSE(sum.requires_grad());
    EXPECT_GT(sum._version(), version);
  }
  const c10::InferenceMode inference;
  at::Tensor sum = values.clone();
  sum += bias;
  EXPECT_TRUE(sum.equal(expected));
}

TEST_F(AutocastOperators, ABiasThatIsFrozenOrAloneIsDifferentiated) {
  const at::Tensor bias = random({16}).cuda();
  const Autocast cast(at::kCUDA, at::kBFloat16);
  {
    const at::Tensor values = random({2, 3, 16}).to(at::kCUDA, at::kBFloat16).requires_grad_();
    at::Tensor sum = values.clone();
    sum += bias;
    sum.sum().backward();
    EXPECT_TRUE(values.grad().equal(at::ones_like(values)));
  }
  const at::Tensor alone = bias.clone().requires_grad_();
  at::Tensor sum = random({2, 3, 16}).to(at::kCUDA, at::kBFloat16);
  sum += alone;
  sum.sum().backward();
  EXPECT_TRUE(alone.grad().equal(at::full_like(bias, 6)));
}

TEST_F(AutocastOperators, AChangeOfASavedTensorIsFound) {
  const at::Tensor x = random({2, 3, 16}).to(at::kCUDA, at::kBFloat16).requires_grad_();
  const Autocast cast(at::kCUDA, at::kBFloat16);
  at::Tensor y = at::tanh(x);
  y += random({16}).cuda();
  EXPECT_THAT(function_of(y), HasSubstr("AddBias"));
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST_F(AutocastOperators, OtherSumsAreLibTorchs) {
  const auto values = [] {
    return random({4, 6, 16}).to(at::kCUDA, at::kBFloat16).requires_grad_().clone();
  };
  const auto expect_left_alone = [](const at::Tensor& before, const at::Tensor& other, double alpha,
                                    const char* what) {
    const at::Tensor expected = before.detach().clone(at::MemoryFormat::Preserve);
    expected.add_(other, alpha);
    const Autocast cast(at::kCUDA, at::kBFloat16);
    at::Tensor sum = before;
    sum.add_(other, alpha);
    EXPECT_THAT(function_of(sum), Not(HasSubstr("AddBias"))) << what;
    EXPECT_TRUE(sum.equal(expected)) << what;
  };
  expect_left_alone(values(), random({6, 16}).cuda(), 1, "two dims");
  expect_left_alone(values(), random({16}).cuda(), 2, "alpha");
  expect_left_alone(values(), random({16}).cuda().to(at::kDouble), 1, "doubles");
  expect_left_alone(values(), random({16}).to(at::kCUDA, at::kBFloat16), 1, "one type");
  expect_left_alone(values(), random({1}).cuda(), 1, "a number");
  expect_left_alone(values().transpose(0, 1).clone(at::MemoryFormat::Preserve), random({16}).cuda(),
                    1, "other strides");
  expect_left_alone(values().narrow(0, 0, 2), random({16}).cuda(), 1, "a view");
  expect_left_alone(values().to(at::kFloat), random({16}).cuda(), 1, "floats");
  expect_left_alone(values().slice(2, 0, 7).clone(), random({7}).cuda(), 1, "an odd width");
  expect_left_alone(values().to(at::kHalf), random({16}).cuda(), 1, "not autocast's type");
}

// ---- Cross-entropy ----

constexpr std::int64_t kIgnored = -100;

at::Tensor partly_ignored(std::int64_t rows, std::int64_t classes) {
  at::Tensor targets = at::randint(classes, {rows}, at::kLong);
  for (std::int64_t row = 1; row < rows; row += 4) targets[row] = kIgnored;
  return targets;
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets, std::int64_t reduction) {
  return at::cross_entropy_loss(logits, targets, {}, reduction, kIgnored);
}

bool is_ours(const at::Tensor& loss) {
  std::function<bool(const torch::autograd::Node*)> leads = [&](const auto* node) {
    if (node == nullptr) return false;
    if (node->name().find("CrossEntropyOfRows") != std::string::npos) return true;
    for (const auto& edge : node->next_edges())
      if (leads(edge.function.get())) return true;
    return false;
  };
  return leads(&*loss.grad_fn());
}

// Checks losses and gradients of logits on the GPU. `view` turns a leaf into the argument of the
// loss.
void expect_losses(
    const at::Tensor& leaf, const at::Tensor& targets, std::int64_t reduction, double rounding,
    const std::string& what,
    const std::function<at::Tensor(const at::Tensor&)>& view = [](const at::Tensor& logits) {
      return logits;
    }) {
  const at::Tensor wide = leaf.detach().to(at::kCPU, at::kDouble).requires_grad_();
  const at::Tensor expected = loss_of(view(wide), targets.cpu(), reduction);
  const at::Tensor slope = random(expected.sizes()).abs() + 0.5;
  const at::Tensor expected_gradient =
      torch::autograd::grad({expected}, {wide}, {slope.to(at::kDouble)})[0];

  const at::Tensor logits = leaf.detach().requires_grad_();
  at::Tensor loss;
  {
    const Autocast cast(at::kCUDA, at::kBFloat16);
    loss = loss_of(view(logits), targets, reduction);
  }
  EXPECT_TRUE(is_ours(loss)) << what;
  EXPECT_EQ(loss.scalar_type(), at::kFloat) << what;
  expect_near(loss, expected, 1e-5, what);
  const at::Tensor gradient = torch::autograd::grad({loss}, {logits}, {slope.cuda()})[0];
  EXPECT_EQ(gradient.scalar_type(), logits.scalar_type()) << what;
  expect_near(gradient, expected_gradient, rounding, what + ", gradient");
}

TEST_F(AutocastOperators, LossesOfAnyShapeAndReduction) {
  for (const auto& [type, rounding, name] : kLogitTypes)
    for (const std::int64_t classes : {512, 1000, 4096, 4099, 50257})
      for (const std::int64_t rows : {1, 5, 130}) {
        const at::Tensor logits = random({rows, classes}, 3.0).to(at::kCUDA, type);
        const at::Tensor targets = partly_ignored(rows, classes).cuda();
        for (const std::int64_t reduction :
             {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum})
          expect_losses(logits, targets, reduction, rounding,
                        fmt::format("{} {} x {}, reduction {}", name, rows, classes, reduction));
      }
}

TEST_F(AutocastOperators, LossesOfMemoryThatLiesAnyhow) {
  constexpr std::int64_t kRows = 9, kClasses = 1001;
  const at::Tensor targets = partly_ignored(kRows, kClasses).cuda();
  for (const auto& [type, rounding, name] : kLogitTypes) {
    for (const std::int64_t offset : {1, 2, 3})
      expect_losses(random({offset + kRows * kClasses}).to(at::kCUDA, type), targets,
                    at::Reduction::Mean, rounding, fmt::format("{} from {} on", name, offset),
                    [&](const at::Tensor& all) {
                      return all.slice(0, offset).view({kRows, kClasses});
                    });
    expect_losses(random({kClasses, kRows}).to(at::kCUDA, type), targets, at::Reduction::Sum,
                  rounding, fmt::format("{} transposed", name),
                  [](const at::Tensor& logits) { return logits.t(); });
    expect_losses(random({kRows, kClasses}).to(at::kCUDA, type),
                  at::stack({targets, targets}, 1).select(1, 0), at::Reduction::Mean, rounding,
                  fmt::format("{} strided targets", name));
  }
}

TEST_F(AutocastOperators, LossesOfLargeLogits) {
  const at::Tensor logits = random({7, 2000}, 1e3).to(at::kCUDA, at::kBFloat16);
  expect_losses(logits, partly_ignored(7, 2000).cuda(), at::Reduction::Mean, 4e-3, "large");
}

TEST_F(AutocastOperators, AllTargetsMayBeIgnored) {
  const at::Tensor logits = random({6, 600}).to(at::kCUDA, at::kBFloat16).requires_grad_();
  const at::Tensor targets = at::full({6}, kIgnored, at::kLong).cuda();
  for (const std::int64_t reduction :
       {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const Autocast cast(at::kCUDA, at::kBFloat16);
    const at::Tensor loss = loss_of(logits, targets, reduction);
    // As in LibTorch, a mean of nothing is not a number.
    if (reduction == at::Reduction::Mean)
      EXPECT_TRUE(std::isnan(loss.item<float>()));
    else
      EXPECT_TRUE(loss.equal(at::zeros_like(loss)));
    const at::Tensor gradient = torch::autograd::grad({loss.sum()}, {logits})[0];
    EXPECT_TRUE(gradient.equal(at::zeros_like(logits))) << reduction;
  }
}

TEST_F(AutocastOperators, LogitsStayAsTheyAre) {
  const at::Tensor leaf = random({12, 1003}).to(at::kCUDA, at::kBFloat16).requires_grad_();
  const at::Tensor logits = leaf.clone(), before = leaf.detach().clone();
  const at::Tensor targets = partly_ignored(12, 1003).cuda();
  const Autocast cast(at::kCUDA, at::kBFloat16);
  const at::Tensor loss = loss_of(logits, targets, at::Reduction::Sum);
  const auto gradient_of = [&](const at::Tensor& value) {
    return torch::autograd::grad({value}, {leaf}, {}, /*retain_graph=*/true)[0];
  };
  const at::Tensor alone = gradient_of(loss);
  EXPECT_TRUE(logits.equal(before));
  EXPECT_TRUE(gradient_of(loss).equal(alone)) << "again";
  const at::Tensor both = gradient_of(loss + logits.to(at::kFloat).sum());
  expect_near(both, alone.to(at::kDouble) + 1, 8e-3, "another use");
  EXPECT_TRUE(logits.equal(before));
}

TEST_F(AutocastOperators, LossesThatAreNotRecorded) {
  const at::Tensor logits = random({12, 1003}).to(at::kCUDA, at::kBFloat16).requires_grad_();
  const at::Tensor targets = partly_ignored(12, 1003).cuda();
  const Autocast cast(at::kCUDA, at::kBFloat16);
  const at::Tensor recorded = loss_of(logits, targets, at::Reduction::Mean);
  {
    const at::NoGradGuard no_grad;
    const at::Tensor loss = loss_of(logits, targets, at::Reduction::Mean);
    EXPECT_FALSE(loss.requires_grad());
    EXPECT_TRUE(loss.equal(recorded.detach()));
  }
  const c10::InferenceMode inference;
  EXPECT_TRUE(loss_of(logits, targets, at::Reduction::Mean).equal(recorded));
}

// Differentiates a weighted sum of the gradient.
TEST_F(AutocastOperators, LossesHaveSecondDerivatives) {
  const at::Tensor targets = partly_ignored(6, 700).cuda(), direction = random({6, 700});
  const auto second = [&](const at::Tensor& leaf, std::int64_t reduction) {
    const at::Tensor loss = loss_of(leaf, targets.to(leaf.device()), reduction).pow(2).sum();
    const at::Tensor first =
        torch::autograd::grad({loss}, {leaf}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    const at::Tensor along = (first * direction.to(leaf.device(), leaf.scalar_type())).sum();
    return torch::autograd::grad({along}, {leaf})[0];
  };
  const at::Tensor logits = random({6, 700});
  for (const std::int64_t reduction :
       {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const at::Tensor expected = second(logits.to(at::kDouble).requires_grad_(), reduction);
    const Autocast cast(at::kCUDA, at::kBFloat16);
    expect_near(second(logits.cuda().requires_grad_(), reduction), expected, 1e-4,
                fmt::format("reduction {}", reduction));
  }
}

TEST_F(AutocastOperators, OtherLossesAreLibTorchs) {
  const at::Tensor targets = partly_ignored(8, 600).cuda();
  const at::Tensor logits = random({8, 600}).to(at::kCUDA, at::kBFloat16).requires_grad_();
  const auto expect_left_alone = [](const at::Tensor& given, const char* what,
                                    const std::function<at::Tensor(const at::Tensor&)>& loss) {
    const at::Tensor expected = loss(given.to(at::kFloat));
    const Autocast cast(at::kCUDA, at::kBFloat16);
    const at::Tensor got = loss(given);
    EXPECT_FALSE(is_ours(got)) << what;
    expect_near(got, expected, 1e-2, what);
  };
  expect_left_alone(logits, "weights", [&](const at::Tensor& x) {
    const at::Tensor weights = at::linspace(0.5, 2, 600, x.options().dtype(at::kFloat));
    return at::cross_entropy_loss(x, targets, weights, at::Reduction::Mean, kIgnored);
  });
  expect_left_alone(logits, "label smoothing", [&](const at::Tensor& x) {
    return at::cross_entropy_loss(x, targets, {}, at::Reduction::Mean, kIgnored, 0.1);
  });
  const at::Tensor likely = random({8, 600}).cuda().softmax(1);
  expect_left_alone(logits, "probabilities",
                    [&](const at::Tensor& x) { return at::cross_entropy_loss(x, likely); });
  expect_left_alone(logits, "few classes", [&](const at::Tensor& x) {
    return loss_of(x.narrow(1, 0, 30), targets.clamp_max(29), at::Reduction::Sum);
  });
  expect_left_alone(logits, "three dims", [&](const at::Tensor& x) {
    return loss_of(x.view({4, 2, 600}).transpose(1, 2), targets.view({4, 2}), at::Reduction::Mean);
  });
  expect_left_alone(logits, "one row", [&](const at::Tensor& x) {
    return loss_of(x[0], targets[0], at::Reduction::Mean);
  });
  // If autocast is off, its key is not used.
  EXPECT_FALSE(is_ours(loss_of(logits, targets, at::Reduction::Mean)));
}

TEST_F(AutocastOperators, LogitsOfAnyValue) {
  const float inf = std::numeric_limits<float>::infinity();
  at::Tensor logits = at::zeros({3, 600}, at::kFloat);
  logits.narrow(1, 2, 598).fill_(-inf);  // words that cannot occur
  logits[2].fill_(std::numeric_limits<float>::quiet_NaN());
  const at::Tensor leaf = logits.cuda().requires_grad_();
  const Autocast cast(at::kCUDA, at::kBFloat16);
  const at::Tensor losses =
      loss_of(leaf, at::tensor({0, 1, 0}, at::kLong).cuda(), at::Reduction::None);
  expect_near(losses.narrow(0, 0, 2), at::full({2}, std::log(2.0)), 1e-6, "two of them can");
  EXPECT_TRUE(std::isnan(losses[2].item<float>()));
  const at::Tensor gradient = torch::autograd::grad({losses[0]}, {leaf})[0].cpu();
  EXPECT_NEAR(gradient[0][0].item<float>(), -0.5, 1e-6);
  EXPECT_NEAR(gradient[0][1].item<float>(), 0.5, 1e-6);
  EXPECT_EQ(gradient[0].narrow(0, 2, 598).abs().max().item<float>(), 0);
}

using AutocastOperatorsDeathTest = AutocastOperators;

TEST_F(AutocastOperatorsDeathTest, ATargetOutsideStopsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto loss = [](std::int64_t wrong) {
    const at::Tensor logits = random({2, 600}).to(at::kCUDA, at::kBFloat16);
    const at::Tensor targets = at::tensor({std::int64_t{0}, wrong}, at::kLong).cuda();
    const Autocast cast(at::kCUDA, at::kBFloat16);
    try {
      loss_of(logits, targets, at::Reduction::Sum).item<float>();
    } catch (const c10::Error& error) {
      std::fprintf(stderr, "%s", error.what());
      std::_Exit(3);
    }
    std::_Exit(0);
  };
  for (const std::int64_t wrong : {-1, 600})
    EXPECT_EXIT(loss(wrong), testing::ExitedWithCode(3), "device-side assert");
}

}  // namespace
}  // namespace lockstep::nn
