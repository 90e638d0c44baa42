#include <lockstep/optim/grad_scaler.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/optim/optimizer.h>

#include "../base/errors.h"
#include "tensors.h"

namespace lockstep::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::numbers;
using testing::parameter;
using testing::same_bits;
using testing::set_gradient;
using testing::snapshot;

TEST(GradScaler, ScaledAndUnscaledIsTheGradientOfTheLoss) {
  const at::Tensor weight = parameter({7, 5}, 1);
  const at::Tensor input = numbers({3, 7}, 2);
  at::mm(input, weight).square().sum().backward();
  const at::Tensor expected = snapshot(weight.grad());
  weight.mutable_grad() = at::Tensor();

  GradScaler scaler;
  scaler.scale(at::mm(input, weight).square().sum()).backward();
  EXPECT_TRUE(same_bits(weight.grad(), expected * 65536));
  EXPECT_TRUE(scaler.update(scaler.unscale({{"weight", weight}})));
  EXPECT_TRUE(same_bits(weight.grad(), expected));
}

TEST(GradScaler, ScalesGradientsOfALossThatKeepsItsValue) {
  const GradScaler scaler({.initial_scale_power = 3});
  const at::Tensor weight = parameter({3}, 1);
  const at::Tensor expected = snapshot(weight) * 2;
  const at::Tensor loss = weight.square().sum();
  const at::Tensor scaled = scaler.scale_gradients_of(loss);
  EXPECT_TRUE(same_bits(scaled.detach(), loss.detach()));
  scaled.backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(same_bits(weight.grad(), expected * 8));
  weight.mutable_grad() = at::Tensor();
  loss.backward();
  EXPECT_TRUE(same_bits(weight.grad(), expected)) << "the caller's own loss is scaled, too";
  const c10::NoGradGuard no_grad;
  EXPECT_EQ(scaler.scale_gradients_of(weight.sum()).item<float>(), weight.sum().item<float>());
}

TEST(GradScaler, ASumOverSamplesIsScaledAsItsMeanIs) {
  GradScaler scaler({.initial_scale_power = 5});
  scaler.set_samples_per_sum(8);
  const at::Tensor weight = parameter({3}, 1);
  scaler.scale((weight * 3).sum()).backward();
  EXPECT_TRUE(same_bits(weight.grad(), at::full({3}, 12.0f)));
  const at::Tensor overflow = scaler.unscale({{"weight", weight}});
  EXPECT_TRUE(same_bits(weight.grad(), at::full({3}, 3.0f)));
  EXPECT_EQ(scaler.loss_scale(), 32);
  EXPECT_THAT(usage_error([&] { scaler.set_samples_per_sum(4); }), HasSubstr("between unscale()"));
  EXPECT_TRUE(scaler.update(overflow));
  for (const double wrong : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()})
    EXPECT_THAT(usage_error([&] { scaler.set_samples_per_sum(wrong); }), HasSubstr("above 0"));
}

TEST(GradScaler, ALossOfSixteenBitsDoesNotOverflow) {
  const GradScaler scaler;
  for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat}) {
    const at::Tensor scaled = scaler.scale(at::full({}, 3, type));
    EXPECT_EQ(scaled.scalar_type(), at::kFloat);
    EXPECT_EQ(scaled.item<float>(), 3 * 65536.0f);
  }
  EXPECT_EQ(scaler.scale(at::full({}, 3, at::kDouble)).scalar_type(), at::kDouble);
}

TEST(GradScaler, RefusesWhatIsNoLoss) {
  const GradScaler scaler;
  EXPECT_THAT(usage_error([&] { scaler.scale(at::Tensor()); }), HasSubstr("undefined"));
  EXPECT_THAT(usage_error([&] { scaler.scale(at::zeros({2}, at::kLong)); }), HasSubstr("Long [2]"));
}

// As with fp16 gradients: those that are too large are inf, and the scale halves until they fit.
TEST(GradScaler, FindsTheScaleThatFits) {
  const at::Tensor weight = at::ones({4}).set_requires_grad(true);
  GradScaler scaler({.hysteresis = 1});
  const auto optimizer = make_optimizer(SGDOptions{}, {{.parameters = {{"weight", weight}}}});
  int skipped = 0;
  bool stepped = false;
  while (!stepped) {
    // A gradient of 10 that passes through Half.
    set_gradient(weight, at::full({4}, 10 * scaler.loss_scale()).to(at::kHalf).to(at::kFloat));
    stepped = scaler.update(scaler.unscale({{"weight", weight}}));
    if (stepped)
      optimizer->step(0.1);
    else
      ++skipped;
  }
  // Half can hold 10 x 4096, but not 10 x 8192.
  EXPECT_EQ(skipped, 4);
  EXPECT_EQ(scaler.loss_scale(), 4096);
  EXPECT_TRUE(same_bits(weight, at::zeros({4})));
}

TEST(GradScaler, AnotherRanksOverflowSkipsTheStepHereToo) {
  const at::Tensor weight = parameter({3}, 1);
  set_gradient(weight, numbers({3}, 2));
  GradScaler scaler({.hysteresis = 1});
  const at::Tensor overflow = scaler.unscale({{"weight", weight}});
  EXPECT_EQ(overflow.item<float>(), 0);
  EXPECT_FALSE(scaler.update(at::ones({1})));
  EXPECT_EQ(scaler.loss_scale(), 32768);
  EXPECT_TRUE(scaler.update(false));
  EXPECT_FALSE(scaler.update(true));
  EXPECT_EQ(scaler.loss_scale(), 16384);
}

// A sum over ranks instead of a maximum, or a nan from elsewhere, counts as an overflow, too.
TEST(GradScaler, AnythingButZeroIsAnOverflow) {
  GradScaler scaler;
  EXPECT_FALSE(scaler.update(at::full({1}, 3)));
  EXPECT_FALSE(scaler.update(at::full({}, std::nan(""))));
  EXPECT_TRUE(scaler.update(at::zeros({1})));
}

TEST(GradScaler, RefusesAnAnswerOfManyElements) {
  GradScaler scaler;
  EXPECT_THAT(usage_error([&] { (void)scaler.update(at::zeros({2})); }), HasSubstr("Float [2]"));
  EXPECT_THAT(usage_error([&] { (void)scaler.update(at::Tensor()); }), HasSubstr("undefined"));
}

TEST(GradScaler, UnscalesOnceInAStep) {
  const at::Tensor weight = parameter({3}, 1);
  set_gradient(weight, numbers({3}, 2));
  GradScaler scaler({.loss_scale = 2});
  scaler.unscale({{"weight", weight}});
  const at::Tensor once = snapshot(weight.grad());
  EXPECT_THAT(usage_error([&] { scaler.unscale({{"weight", weight}}); }), HasSubstr("twice"));
  EXPECT_TRUE(same_bits(weight.grad(), once));
  EXPECT_TRUE(scaler.update(false));
  scaler.unscale({{"weight", weight}});
  EXPECT_TRUE(same_bits(weight.grad(), once / 2));
}

TEST(GradScaler, AStepThatWasRefusedCanBeTriedAgain) {
  const at::Tensor weight = parameter({3}, 1);
  set_gradient(weight, numbers({3}, 2));
  GradScaler scaler;
  usage_error([&] { scaler.unscale({{"weight", weight}, {"weight", weight}}); });
  EXPECT_EQ(scaler.unscale({{"weight", weight}}).item<float>(), 0);
}

TEST(GradScaler, AFixedScaleOfOneOnlyLooks) {
  const at::Tensor weight = parameter({3}, 1, at::kBFloat16);
  const at::Tensor gradient = numbers({3}, 2, at::kBFloat16);
  set_gradient(weight, gradient.clone());
  GradScaler scaler({.loss_scale = 1});
  EXPECT_TRUE(scaler.update(scaler.unscale({{"weight", weight}})));
  EXPECT_TRUE(same_bits(weight.grad(), gradient));
  weight.mutable_grad()[2] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(scaler.update(scaler.unscale({{"weight", weight}})));
  EXPECT_EQ(scaler.loss_scale(), 1);
}

TEST(GradScaler, StateGoesThroughACheckpoint) {
  const LossScaleOptions options{.loss_scale_window = 3, .hysteresis = 2};
  GradScaler first(options);
  (void)first.update(true);
  (void)first.update(false);
  (void)first.update(false);
  GradScaler second(options);
  auto saved = first.state();
  std::reverse(saved.begin(), saved.end());
  second.load_state(saved);
  for (GradScaler* scaler : {&first, &second}) {
    EXPECT_TRUE(scaler->update(false));
    EXPECT_EQ(scaler->loss_scale(), 131072);
    EXPECT_FALSE(scaler->update(true));
    EXPECT_FALSE(scaler->update(true));
    EXPECT_EQ(scaler->loss_scale(), 65536);
  }
}

TEST(GradScaler, RefusesAnotherState) {
  GradScaler scaler;
  EXPECT_THAT(usage_error([&] { scaler.load_state({}); }), HasSubstr("'loss_scale' is missing"));
  auto damaged = scaler.state();
  damaged[0].tensor = at::scalar_tensor(-1, at::kDouble);
  EXPECT_THAT(usage_error([&] { scaler.load_state(damaged); }), HasSubstr("damaged"));
  EXPECT_EQ(scaler.loss_scale(), 65536);
}

}  // namespace
}  // namespace lockstep::optim
