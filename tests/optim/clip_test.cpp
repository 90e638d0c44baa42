#include <lockstep/optim/clip.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/optim/sum_of_squares.h>

#include "../base/errors.h"
#include "tensors.h"

namespace lockstep::optim {
namespace {

using ::testing::HasSubstr;
using testing::numbers;
using testing::parameter;
using testing::same_bits;
using testing::snapshot;
using testing::with_gradient;

double norm_of(const std::vector<NamedParameter>& parameters) {
  return gradient_norm(parameters).item<double>();
}

TEST(GradientNorm, IsTheRootOfTheSumOfSquares) {
  const std::vector<NamedParameter> parameters = {with_gradient("a", numbers({100, 101}, 1)),
                                                  with_gradient("b", numbers({7}, 2, at::kDouble)),
                                                  {"no gradient", parameter({3}, 3)},
                                                  with_gradient("c", numbers({30, 40}, 4).t())};
  double sum = 0;
  for (const auto& [name, tensor] : parameters)
    if (tensor.grad().defined()) sum += tensor.grad().to(at::kDouble).square().sum().item<double>();
  EXPECT_NEAR(norm_of(parameters), std::sqrt(sum), 1e-12);
}

TEST(GradientNorm, IsRightWhereFloatsWouldNotBe) {
  // A sum of squares in float would overflow, or lose all of the small ones.
  EXPECT_NEAR(norm_of({with_gradient("a", at::full({10000}, 1e30))}) / 1e32, 1, 1e-6);
  at::Tensor uneven = at::full({1 << 20}, 1e-4);
  uneven[0] = 1;
  EXPECT_NEAR(norm_of({with_gradient("a", uneven)}), std::sqrt(1 + ((1 << 20) - 1) * 1e-8), 1e-9);
}

TEST(GradientNorm, OfSixteenBits) {
  const at::Tensor gradient = numbers({5000}, 1);
  for (const auto type : {at::kHalf, at::kBFloat16})
    EXPECT_EQ(norm_of({with_gradient("a", gradient.to(type))}),
              norm_of({with_gradient("a", gradient.to(type).to(at::kFloat))}));
}

TEST(GradientNorm, BitsDependOnNeitherThreadsNorMemory) {
  const at::Tensor gradient = numbers({1003, 997}, 1);
  double alone = 0;
  {
    const Threads threads(1);
    alone = norm_of({with_gradient("a", gradient)});
  }
  for (const int count : {2, 3, 4}) {
    const Threads threads(count);
    EXPECT_EQ(norm_of({with_gradient("a", gradient)}), alone);
    EXPECT_EQ(norm_of({with_gradient("a", gradient.t().contiguous().t())}), alone);
  }
}

TEST(GradientNorm, OfNothingIsNothing) {
  EXPECT_EQ(norm_of({}), 0);
  EXPECT_EQ(norm_of({{"no gradient", parameter({3}, 1)}}), 0);
  EXPECT_EQ(norm_of({with_gradient("empty", at::empty({0, 3}))}), 0);
}

TEST(GradientNorm, CudaHasTheSameBits) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  std::vector<NamedParameter> here;
  std::vector<NamedParameter> there;
  std::vector<NamedParameter> mixed;
  std::uint64_t key = 1;
  // Some sizes are whole blocks, others end within one.
  for (const std::int64_t count : {9000001, 4096, 4097, 1, 0, 100000}) {
    const at::Tensor gradient = numbers({count}, key++);
    const std::string name = std::to_string(count);
    here.push_back(with_gradient(name, gradient));
    there.push_back(with_gradient(name, gradient.cuda()));
    mixed.push_back(key % 2 == 0 ? here.back() : there.back());
  }
  EXPECT_EQ(norm_of(there), norm_of(here));
  EXPECT_EQ(norm_of(mixed), norm_of(here));
}

// The contribution of a shard that is cut between blocks.
TEST(SumsOfSquares, AreThoseOfTheWhole) {
  const at::Tensor whole = numbers({10, 4096 + 13}, 1);
  const std::int64_t num_blocks = num_norm_blocks(whole);
  ASSERT_EQ(num_blocks, 11);
  const at::Tensor all = sums_of_squares(std::vector{whole});
  ASSERT_EQ(all.numel(), 11);
  for (std::int64_t cut = 0; cut <= num_blocks; ++cut) {
    const std::int64_t place = std::min(cut * kNormBlock, whole.numel());
    const at::Tensor flat = whole.view({-1});
    EXPECT_TRUE(
        same_bits(sums_of_squares(std::vector{flat.slice(0, 0, place), flat.slice(0, place)}), all))
        << cut;
  }
  EXPECT_THAT(usage_error([&] { sums_of_squares(std::vector{whole.to(at::kLong)}); }),
              HasSubstr("Long"));
}

// These numbers have another sum in any other order.
TEST(AddInOrder, AddsAsOneThreadDoes) {
  const at::Tensor values = numbers({5000}, 3).to(at::kDouble).exp();
  const std::vector<std::vector<mesh::Interval>> sums = {
      {{4000, 5000}, {0, 1}, {7, 7}, {1, 33}}, {}, {{33, 4000}}, {{4999, 5000}}};
  double wanted = 0;
  for (const auto& segments : sums) {
    double sum = 0;
    for (const auto& [begin, end] : segments)
      for (std::int64_t i = begin; i < end; ++i) sum += values[i].item<double>();
    wanted += sum;
  }
  EXPECT_EQ(add_in_order(values, sums).item<double>(), wanted);
  EXPECT_EQ(add_in_order(at::empty({0}, at::kDouble), {}).item<double>(), 0);
  if (at::hasCUDA()) {
    EXPECT_EQ(add_in_order(values.cuda(), sums).item<double>(), wanted);
    EXPECT_EQ(add_in_order(at::empty({0}, at::kDouble).cuda(), {}).item<double>(), 0);
  }
}

TEST(ClipGradients, DividesWhatIsTooLong) {
  const std::vector<NamedParameter> parameters = {with_gradient("a", at::full({4}, 3.0)),
                                                  {"no gradient", parameter({3}, 3)},
                                                  with_gradient("b", at::full({4, 1}, 4.0))};
  const ClipResult result = clip_gradients(parameters, 2);
  EXPECT_DOUBLE_EQ(result.norm, 10);
  EXPECT_TRUE(result.finite);
  EXPECT_TRUE(result.clipped);
  const double c = (10 + 1e-6) / 2;
  EXPECT_TRUE(at::allclose(parameters[0].tensor.grad(), at::full({4}, 3 / c), 1e-7));
  EXPECT_TRUE(at::allclose(parameters[2].tensor.grad(), at::full({4, 1}, 4 / c), 1e-7));
  EXPECT_FALSE(parameters[1].tensor.grad().defined());
  EXPECT_NEAR(norm_of(parameters), 2, 1e-6);
}

TEST(ClipGradients, LeavesTheRestAlone) {
  const at::Tensor gradient = numbers({100}, 1);
  const NamedParameter a = with_gradient("a", gradient.clone());
  const double norm = norm_of({a});
  for (const double max_norm : {norm + 1e-5, 1e9, 0.0, std::numeric_limits<double>::infinity()}) {
    const ClipResult result = clip_gradients({a}, max_norm);
    EXPECT_EQ(result.norm, norm);
    EXPECT_FALSE(result.clipped) << max_norm;
    EXPECT_TRUE(same_bits(a.tensor.grad(), gradient));
  }
  // The 1e-6 in DeepSpeed's formula decides here.
  EXPECT_TRUE(clip_gradients({a}, norm + 1e-7).clipped);
}

TEST(ClipGradients, WhatIsNotFiniteIsSaidAndLeftAlone) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    at::Tensor gradient = numbers({10000}, 1);
    gradient[9999] = bad;
    const NamedParameter a = with_gradient("a", numbers({50}, 2));
    const at::Tensor before = snapshot(a.tensor.grad());
    const ClipResult result = clip_gradients({a, with_gradient("b", gradient)}, 1e-3);
    EXPECT_FALSE(result.finite);
    EXPECT_FALSE(std::isfinite(result.norm));
    EXPECT_FALSE(result.clipped);
    EXPECT_TRUE(same_bits(a.tensor.grad(), before));
  }
}

// The norm is that of all ranks, and this rank has no gradients, or empty parts.
TEST(ClipGradients, OfARankThatHasNone) {
  const NormScope scope{.sum = [](const at::Tensor& mine) { return at::full_like(mine, 100.0); }};
  const ClipResult none = clip_gradients({{"a", parameter({3}, 1)}}, 1.0, scope);
  EXPECT_EQ(none.norm, 10);
  const at::Tensor kept = numbers({5}, 1);
  const std::vector<NamedParameter> some = {with_gradient("first", at::empty({0})),
                                            with_gradient("kept", kept.clone()),
                                            with_gradient("last", at::empty({0, 3}))};
  EXPECT_TRUE(clip_gradients(some, 1.0, scope).clipped);
  EXPECT_TRUE(at::allclose(some[1].tensor.grad(), kept / 10.0, 1e-5));
}

TEST(ClipFactor, IsWhatGradientsAreMultipliedBy) {
  for (const double max_norm : {0.0, 1e-3, 0.7, 1e6}) {
    auto clipped = with_gradient("a", numbers({1000}, 1));
    const at::Tensor before = clipped.tensor.grad().clone();
    const double factor = clip_factor(gradient_norm({clipped}), max_norm).item<double>();
    clip_gradients({clipped}, max_norm);
    EXPECT_TRUE(same_bits(clipped.tensor.grad(), before * factor)) << max_norm;
    if (at::hasCUDA()) {
      const at::Tensor norm = gradient_norm({with_gradient("a", before.cuda())});
      EXPECT_TRUE(norm.is_cuda());
      EXPECT_EQ(clip_factor(norm, max_norm).item<double>(), factor) << max_norm;
    }
  }
  const at::Tensor large = at::scalar_tensor(1e3, at::kDouble);
  EXPECT_EQ(clip_factor(large, 0).item<double>(), 1);
  for (const double norm : {std::nan(""), HUGE_VAL})
    for (const double max_norm : {0.0, 1.0})
      EXPECT_EQ(clip_factor(at::scalar_tensor(norm, at::kDouble), max_norm).item<double>(), 0);
  EXPECT_THAT(usage_error([&] { clip_factor(large, -1); }), HasSubstr("-1"));
}

TEST(ClipGradients, Nothing) {
  const ClipResult result = clip_gradients({}, 1);
  EXPECT_EQ(result.norm, 0);
  EXPECT_TRUE(result.finite);
  EXPECT_FALSE(result.clipped);
}

TEST(ClipGradients, Refusals) {
  EXPECT_THAT(usage_error([] { clip_gradients({}, -1); }), HasSubstr("-1"));
  EXPECT_THAT(usage_error([] { clip_gradients({}, std::nan("")); }), HasSubstr("nan"));
  const NamedParameter a = with_gradient("a", numbers({3}, 1));
  EXPECT_THAT(usage_error([&] {
                clip_gradients({a, {"b", a.tensor}}, 1);
              }),
              HasSubstr("'a' and 'b' are one tensor"));
}

}  // namespace
}  // namespace lockstep::optim
