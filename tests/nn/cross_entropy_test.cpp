#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include <lockstep/nn/layers/cross_entropy.h>

#include "../base/errors.h"
#include "compare.h"

namespace lockstep::nn {
namespace {

using testing::HasSubstr;

// Targets, some of which are to be ignored.
at::Tensor some_targets(std::int64_t rows, std::int64_t vocabulary) {
  auto targets = at::randint(vocabulary, {rows}, at::TensorOptions(at::kLong));
  for (std::int64_t row = 2; row < rows; row += 5) targets[row] = kIgnoredTarget;
  return targets;
}

at::Tensor plain_loss(const at::Tensor& logits, const at::Tensor& targets) {
  const auto here = targets.to(logits.device());
  const auto valid = here.ne(kIgnoredTarget);
  const auto each = logits.log_softmax(1).gather(1, here.clamp_min(0).unsqueeze(1)).squeeze(1);
  return -(each * valid).sum();
}

Computation fused(const at::Tensor& targets) {
  return [targets](const Tensors& in) { return cross_entropy(in[0], targets).sum; };
}
Computation fused_linear(const at::Tensor& targets) {
  return [targets](const Tensors& in) { return linear_cross_entropy(in[0], in[1], targets).sum; };
}
Computation plain(const at::Tensor& targets) {
  return [targets](const Tensors& in) { return plain_loss(in[0], targets); };
}
Computation plain_linear(const at::Tensor& targets) {
  return [targets](const Tensors& in) { return plain_loss(in[0].mm(in[1].t()), targets); };
}

TEST(CrossEntropy, MatchesTheDefinition) {
  for (const std::int64_t vocabulary : {1, 7, 300, 50257})
    for (const std::int64_t rows : {0, 1, 7, 33}) {
      const auto targets = some_targets(rows, vocabulary);
      expect_matches(fused(targets), plain(targets), {random({rows, vocabulary}, 4.0)}, 1e-6,
                     fmt::format("{} x {}", rows, vocabulary));
    }
}

TEST(CrossEntropy, MatchesTheDefinitionWhereNumbersAreLarge) {
  const auto targets = some_targets(9, 40);
  expect_matches(fused(targets), plain(targets), {random({9, 40}, 1e3)}, 1e-6, "large");
}

TEST(CrossEntropy, ReadsAnyStrides) {
  const auto targets = some_targets(9, 40);
  expect_matches([&](const Tensors& in) { return fused(targets)({in[0].t()}); },
                 [&](const Tensors& in) { return plain(targets)({in[0].t()}); }, {random({40, 9})},
                 1e-6, "transposed");
  const auto strided = at::stack({targets, targets}, 1).select(1, 0);
  expect_matches(fused(strided), plain(targets), {random({9, 40})}, 1e-6, "targets");
}

TEST(CrossEntropy, CountsWhatIsNotIgnored) {
  const auto targets = at::tensor({1, -100, 0, -100, 3}, at::kLong);
  EXPECT_EQ(cross_entropy(random({5, 4}), targets).count, 3);
  EXPECT_EQ(linear_cross_entropy(random({5, 2}), random({4, 2}), targets).count, 3);
  const auto others = at::tensor({1, 7, 0, 7, 3}, at::kLong);
  EXPECT_EQ(cross_entropy(random({5, 4}), others, 7).count, 3);
  EXPECT_EQ(linear_cross_entropy(random({5, 2}), random({4, 2}), others, 7).count, 3);
  const auto none = at::full({5}, kIgnoredTarget, at::kLong);
  const auto loss = cross_entropy(random({5, 4}), none);
  EXPECT_EQ(loss.count, 0);
  EXPECT_EQ(loss.sum.item<float>(), 0.0f);
}

TEST(CrossEntropy, CountsOnTheHostWhatIsThere) {
  const auto host = at::tensor({1, -100, 0, 2, 3}, at::kLong);
  const auto hidden = random({5, 2}), weight = random({4, 2});
  const auto wanted = linear_cross_entropy(hidden, weight, host);
  const auto got = linear_cross_entropy(hidden, weight, {host.clone(), host});
  EXPECT_EQ(got.count, 4);
  EXPECT_TRUE(got.sum.equal(wanted.sum));
  EXPECT_EQ(cross_entropy(random({5, 4}), {host.clone(), host}).count, 4);
  const auto outside = at::tensor({1, -100, 0, 4, 3}, at::kLong);
  EXPECT_THAT(usage_error([&] {
                linear_cross_entropy(hidden, weight, {host, outside});
              }),
              ::testing::HasSubstr("the target of row 3 is 4, outside the vocabulary"));
  EXPECT_THAT(usage_error([&] {
                linear_cross_entropy(hidden, weight, {host, host.slice(0, 1)});
              }),
              ::testing::HasSubstr("said to be the same on the host is Long of the shape [4]"));
}

TEST(CrossEntropy, OfAnEmptyVocabularyIsNothing) {
  const auto none = at::full({5}, kIgnoredTarget, at::kLong);
  const auto check = [](const LossSum& loss) {
    EXPECT_EQ(loss.count, 0);
    EXPECT_EQ(loss.sum.item<float>(), 0.0f);
    loss.sum.backward();
  };
  auto logits = random({5, 0}).requires_grad_();
  check(cross_entropy(logits, none));
  auto hidden = random({5, 2}).requires_grad_(), weight = random({0, 2}).requires_grad_();
  check(linear_cross_entropy(hidden, weight, none));
  EXPECT_TRUE(hidden.grad().equal(at::zeros({5, 2})));
  EXPECT_EQ(weight.grad().numel(), 0);
}

TEST(LinearCrossEntropy, MatchesTheDefinition) {
  for (const std::int64_t vocabulary : {1, 7, 50257})
    for (const std::int64_t rows : {0, 1, 7, 33}) {
      const auto targets = some_targets(rows, vocabulary);
      expect_matches(fused_linear(targets), plain_linear(targets),
                     {random({rows, 12}), random({vocabulary, 12})},
                     // A sum over a vocabulary in float32 is as exact as the BLAS makes it.
                     vocabulary > 1000 ? 3e-5 : 2e-6, fmt::format("{} x {}", rows, vocabulary));
    }
}

TEST(LinearCrossEntropy, MatchesTheDefinitionOverSeveralBlocks) {
  const auto targets = some_targets(200, 50257);
  expect_matches(fused_linear(targets), plain_linear(targets),
                 {random({200, 8}), random({50257, 8})}, 3e-5, "blocks");
}

TEST(LinearCrossEntropy, ComputesTheGradientsThatAreWanted) {
  const auto targets = some_targets(20, 30);
  const auto hidden = random({20, 6}), weight = random({30, 6});
  const auto whole = differentiate(fused_linear(targets), {hidden, weight}, at::ones({}));
  const auto of_hidden = differentiate(
      [&](const Tensors& in) {
        return fused_linear(targets)({in[0], weight});
      },
      {hidden}, at::ones({}));
  const auto of_weight = differentiate(
      [&](const Tensors& in) {
        return fused_linear(targets)({hidden, in[0]});
      },
      {weight}, at::ones({}));
  expect_same_bits({whole[1], whole[2]}, {of_hidden[1], of_weight[1]}, "one of the two");
  const auto loss = linear_cross_entropy(hidden, weight, targets).sum;
  EXPECT_FALSE(loss.requires_grad());
  EXPECT_TRUE(at::equal(loss, whole[0]));
}

TEST(LinearCrossEntropy, MayBeDifferentiatedAgain) {
  const auto targets = some_targets(20, 30);
  auto hidden = random({20, 6}).requires_grad_(), weight = random({30, 6}).requires_grad_();
  const auto loss = linear_cross_entropy(hidden, weight, targets).sum;
  const auto factor = at::full({}, 0.25, at::kFloat);
  const auto first = torch::autograd::grad({loss}, {hidden, weight}, {factor}, true);
  const auto again = torch::autograd::grad({loss}, {hidden, weight}, {factor}, true);
  expect_same_bits(first, again, "again");
}

TEST(LinearCrossEntropy, ReadsAnyStrides) {
  const auto targets = some_targets(9, 40);
  const auto transposed = [](const Tensors& in) { return Tensors{in[0].t(), in[1].t()}; };
  expect_matches([&](const Tensors& in) { return fused_linear(targets)(transposed(in)); },
                 [&](const Tensors& in) { return plain_linear(targets)(transposed(in)); },
                 {random({5, 9}), random({5, 40})}, 2e-6, "transposed");
}

TEST(CrossEntropy, GivesTheSameBitsOnAnyNumberOfThreads) {
  const auto targets = some_targets(300, 2000);
  expect_repeatable(fused(targets), {random({300, 2000})}, at::ones({}), "cross_entropy");
}

// The BLAS computes its products, and may share a sum among threads in another way.
TEST(LinearCrossEntropy, GivesTheSameBitsAgain) {
  const auto computation = fused_linear(some_targets(300, 2000));
  const Tensors inputs = {random({300, 24}), random({2000, 24})};
  const Threads threads(1);
  expect_same_bits(differentiate(computation, inputs, at::ones({})),
                   differentiate(computation, inputs, at::ones({})), "again");
}

TEST(CrossEntropy, WorksInFloat64AndOnCuda) {
  const auto targets = some_targets(11, 13);
  const auto logits = random({11, 13}), hidden = random({11, 5}), weight = random({13, 5});
  expect_matches(fused(targets), plain(targets), {logits.to(at::kDouble)}, 1e-12, "float64");
  expect_matches(fused_linear(targets), plain_linear(targets),
                 {hidden.to(at::kDouble), weight.to(at::kDouble)}, 1e-12, "float64 linear");
  if (!at::hasCUDA()) return;
  const auto there = targets.cuda();
  expect_matches(fused(there), plain(targets), {logits.cuda()}, 1e-5, "cuda");
  expect_matches(fused_linear(there), plain_linear(targets), {hidden.cuda(), weight.cuda()}, 1e-5,
                 "cuda linear");
  expect_matches(fused_linear(there), plain_linear(targets),
                 {hidden.cuda().to(at::kBFloat16), weight.cuda().to(at::kBFloat16)}, 2e-2,
                 "cuda bfloat16");
}

TEST(CrossEntropy, RefusesWhatItCannotDo) {
  const auto targets = [](std::int64_t second) {
    return at::tensor({std::int64_t{1}, second}, at::kLong);
  };
  for (const std::int64_t wrong : {-1, 4, 50256}) {
    EXPECT_THAT(usage_error([&] {
                  cross_entropy(random({2, 4}), targets(wrong));
                }),
                HasSubstr(fmt::format("row 1 is {}, outside the vocabulary of 4", wrong)));
    EXPECT_THAT(usage_error([&] {
                  linear_cross_entropy(random({2, 3}), random({4, 3}), targets(wrong));
                }),
                HasSubstr(fmt::format("row 1 is {}, outside the vocabulary of 4", wrong)));
  }
  EXPECT_THAT(usage_error([&] {
                cross_entropy(random({3, 4}), targets(0));
              }),
              HasSubstr("of the shape [2]: they must be Long (int64) of the shape [3]"));
  EXPECT_THAT(usage_error([&] {
                cross_entropy(random({2, 4}), targets(0).to(at::kInt));
              }),
              HasSubstr("targets are Int"));
  EXPECT_THAT(usage_error([&] { cross_entropy(random({2}), targets(0)); }),
              HasSubstr("[rows, vocabulary]"));
  EXPECT_THAT(usage_error([&] {
                linear_cross_entropy(random({2, 3}), random({4, 5}), targets(0));
              }),
              HasSubstr("[2, 3] and weight [4, 5]"));
  EXPECT_THAT(double_backward_error(fused(targets(0)), {random({2, 4})}),
              HasSubstr("nn::cross_entropy has no second derivative"));
  EXPECT_THAT(double_backward_error(fused_linear(targets(0)), {random({2, 3}), random({4, 3})}),
              HasSubstr("nn::linear_cross_entropy has no second derivative"));
}

}  // namespace
}  // namespace lockstep::nn
