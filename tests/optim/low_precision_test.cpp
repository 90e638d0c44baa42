// Steps on weights of 16 bits.
#include <limits>

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/optim/adamw/plain/kernel.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/round_with_operators.h>

#include "tensors.h"

namespace lockstep::optim {
namespace {

using ::testing::HasSubstr;
using testing::numbers;
using testing::parameter;
using testing::same_bits;
using testing::snapshot;

constexpr std::int64_t kNarrowSize = 70'001;  // two blocks of a step, and no multiple of a draw
constexpr double kNarrowRate = 0.02;

std::vector<OptimizerType> elementwise_types() {
  std::vector<OptimizerType> all;
  for (const OptimizerType& one : optimizer_types())
    if (one.options.kind() == StepKind::elementwise) all.push_back(one);
  return all;
}

struct NarrowWay {
  at::ScalarType type;
  SixteenBits bits;
};
std::vector<NarrowWay> narrow_ways() {
  std::vector<NarrowWay> all;
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf})
    for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic})
      for (const bool in_state : {false, true})
        all.push_back({type, {.rounding = rounding, .in_state = in_state, .seed = 5}});
  return all;
}

void give_narrow_gradient(const at::Tensor& weight, int step, std::int64_t first = 0,
                          std::int64_t count = kNarrowSize) {
  weight.mutable_grad() = numbers({kNarrowSize}, static_cast<std::uint64_t>(100 + step))
                              .narrow(0, first, count)
                              .to(weight.scalar_type(), false, true);
}

std::vector<at::Tensor> state_tensors_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const NamedTensor& one : optimizer.state())
    if (one.tensor.dim() > 0) all.push_back(one.tensor);
  return all;
}

TEST(SixteenBitWeights, MoveToTheSameBitsWhereverTheyAreCut) {
  for (const OptimizerType& type : elementwise_types())
    for (const NarrowWay& way : narrow_ways()) {
      SCOPED_TRACE(type.names.front());
      const at::Tensor whole = parameter({kNarrowSize}, 1, way.type);
      const auto reference =
          make_optimizer(type.options, {{.parameters = {{"w", whole}}, .sixteen_bits = way.bits}});
      constexpr std::int64_t kCut = 33'333;
      const at::Tensor first = snapshot(whole).narrow(0, 0, kCut).clone();
      const at::Tensor second = snapshot(whole).narrow(0, kCut, kNarrowSize - kCut).clone();
      std::vector<std::unique_ptr<Optimizer>> parts;
      for (const auto& [part, before] :
           {std::pair(first, std::int64_t{0}), std::pair(second, kCut)})
        parts.push_back(make_optimizer(
            type.options, {{.parameters = {{"w", part}},
                            .sixteen_bits = way.bits,
                            .elements_before = [before = before](const std::string& name) {
                              EXPECT_EQ(name, "w");
                              return before;
                            }}}));
      for (int step = 0; step < 3; ++step) {
        give_narrow_gradient(whole, step);
        give_narrow_gradient(first, step, 0, kCut);
        give_narrow_gradient(second, step, kCut, kNarrowSize - kCut);
        const StepFactor factor(at::scalar_tensor(0.37, at::kDouble));
        reference->step(kNarrowRate, factor);
        for (const auto& one : parts) one->step(kNarrowRate, factor);
      }
      EXPECT_TRUE(same_bits(at::cat({first, second}), whole));
      const auto wanted = state_tensors_of(*reference);
      const auto got_first = state_tensors_of(*parts[0]), got_second = state_tensors_of(*parts[1]);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_EQ(wanted[i].scalar_type(), way.bits.in_state ? way.type : at::kFloat);
        EXPECT_TRUE(same_bits(at::cat({got_first[i], got_second[i]}), wanted[i]));
      }
    }
}

TEST(SixteenBitWeights, AreThoseOfAStepInFloatsRounded) {
  for (const NarrowWay& way : narrow_ways()) {
    const at::Tensor weight = parameter({kNarrowSize}, 1, way.type);
    const at::Tensor wide = snapshot(weight).to(at::kFloat);
    const auto optimizer =
        make_optimizer(AdamWOptions{}, {{.parameters = {{"w", weight}}, .sixteen_bits = way.bits}});
    const auto in_floats = make_optimizer(AdamWOptions{}, {{.parameters = {{"w", wide}}}});
    give_narrow_gradient(weight, 0);
    wide.mutable_grad() = weight.grad().to(at::kFloat) * 0.5f;
    optimizer->step(kNarrowRate, StepFactor(at::scalar_tensor(0.5, at::kDouble)));
    in_floats->step(kNarrowRate);
    const at::Tensor rounded = at::empty_like(snapshot(weight));
    // The same rounding as the kernel's, by LibTorch's operators.
    round_with_operators(wide, rounded, way.bits.rounding,
                         {.key = hash_text("5/rounding/w"), .step = 1});
    EXPECT_TRUE(same_bits(weight, rounded));
    const auto state = state_tensors_of(*optimizer), wide_state = state_tensors_of(*in_floats);
    for (std::size_t i = 0; i < state.size(); ++i) {
      const at::Tensor narrow_state = at::empty_like(state[i]);
      if (way.bits.in_state)
        round_with_operators(wide_state[i], narrow_state, way.bits.rounding,
                             {.key = hash_text("5/rounding/w") + 1 + i, .step = 1});
      EXPECT_TRUE(same_bits(state[i], way.bits.in_state ? narrow_state : wide_state[i]));
    }
  }
}

TEST(SixteenBitWeights, AreRoundedByOperatorsAsByTheKernel) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf})
    for (const double scale : {1.0, 1e-6, 3e4}) {
      const at::Tensor values = numbers({5'003}, 3) * scale;
      values[7] = std::numeric_limits<float>::infinity();
      values[8] = -1e30;
      values[9] = 0;
      const RandomBits random{.key = 0xfedcba9876543210ull, .step = 3'000'000'000'000, .first = 13};
      const at::Tensor by_operators = at::empty({5'003}, type);
      round_with_operators(values, by_operators, Rounding::stochastic, random);
      const at::Tensor by_kernel = at::empty({5'003}, type);
      if (type == at::kHalf)
        narrow(values.data_ptr<float>(), 5'003, static_cast<Float16*>(by_kernel.data_ptr()),
               random);
      else
        narrow(values.data_ptr<float>(), 5'003, static_cast<BFloat16*>(by_kernel.data_ptr()),
               random);
      EXPECT_TRUE(same_bits(by_operators, by_kernel)) << scale;
      EXPECT_FALSE(same_bits(by_kernel, values.to(type))) << "nothing was rounded at random";
    }
}

// A step of 2^-12 of a weight is lost by the nearest bfloat16, and on average kept at random.
TEST(SixteenBitWeights, MoveBySmallStepsWhereTheyAreRoundedAtRandom) {
  for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    const at::Tensor weight = at::ones({20'000}, at::kBFloat16);
    const auto optimizer =
        make_optimizer(SGDOptions{.momentum = 0},
                       {{.parameters = {{"w", weight}}, .sixteen_bits = {.rounding = rounding}}});
    for (int step = 0; step < 16; ++step) {
      weight.mutable_grad() = at::ones_like(weight);
      optimizer->step(0x1p-12);
    }
    const double mean = weight.to(at::kDouble).mean().item<double>();
    if (rounding == Rounding::nearest)
      EXPECT_EQ(mean, 1);
    else
      EXPECT_NEAR(mean, 1 - 16 * 0x1p-12, 2e-4);
  }
}

TEST(SixteenBitWeights, AreLeftAloneByAFactorOfZero) {
  const at::Tensor weight = parameter({100}, 1, at::kBFloat16);
  const at::Tensor before = snapshot(weight);
  const auto optimizer = make_optimizer(AdamWOptions{}, {{.parameters = {{"w", weight}}}});
  weight.mutable_grad() = at::full({100}, std::numeric_limits<float>::quiet_NaN(), at::kBFloat16);
  optimizer->step(kNarrowRate, StepFactor(at::zeros({}, at::kDouble)));
  EXPECT_TRUE(same_bits(weight, before));
  EXPECT_EQ(optimizer->state().front().tensor.item<std::int64_t>(), 0);
}

TEST(SixteenBitWeights, CudaHasTheCpusBits) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const NarrowWay& way : narrow_ways()) {
    const at::Tensor weight = parameter({kNarrowSize}, 1, way.type);
    const at::Tensor on_gpu = snapshot(weight).to(at::kCUDA);
    const auto optimizer =
        make_optimizer(AdamWOptions{}, {{.parameters = {{"w", weight}}, .sixteen_bits = way.bits}});
    const auto gpu =
        make_optimizer(AdamWOptions{}, {{.parameters = {{"w", on_gpu}}, .sixteen_bits = way.bits}});
    for (int step = 0; step < 3; ++step) {
      give_narrow_gradient(weight, step);
      on_gpu.mutable_grad() = weight.grad().to(at::kCUDA);
      optimizer->step(kNarrowRate, StepFactor(at::scalar_tensor(0.37, at::kDouble)));
      gpu->step(kNarrowRate, StepFactor(at::scalar_tensor(0.37, at::kDouble).to(at::kCUDA)));
    }
    EXPECT_TRUE(same_bits(on_gpu.cpu(), weight));
    const auto state = state_tensors_of(*optimizer), gpu_state = state_tensors_of(*gpu);
    for (std::size_t i = 0; i < state.size(); ++i)
      EXPECT_TRUE(same_bits(gpu_state[i].cpu(), state[i]));
  }
}

TEST(SixteenBitWeights, ResumeToTheBit) {
  for (const NarrowWay& way : narrow_ways()) {
    const at::Tensor weight = parameter({1'000}, 1, way.type);
    const ParameterGroup group{.parameters = {{"w", weight}}, .sixteen_bits = way.bits};
    const auto optimizer = make_optimizer(AdamWOptions{}, {group});
    const auto step = [](const at::Tensor& tensor, Optimizer& with, int number) {
      tensor.mutable_grad() =
          numbers({1'000}, static_cast<std::uint64_t>(number)).to(tensor.scalar_type());
      with.step(kNarrowRate);
    };
    for (int number = 0; number < 2; ++number) step(weight, *optimizer, number);
    const at::Tensor other = snapshot(weight);
    const auto resumed =
        make_optimizer(AdamWOptions{}, {{.parameters = {{"w", other}}, .sixteen_bits = way.bits}});
    resumed->load_state(optimizer->state());
    for (int number = 2; number < 4; ++number) {
      step(weight, *optimizer, number);
      step(other, *resumed, number);
    }
    EXPECT_TRUE(same_bits(weight, other));
  }
}

TEST(SixteenBitWeights, AreRefusedByOptimizersOfWholeParameters) {
  for (const OptimizerType& type : optimizer_types()) {
    if (type.options.kind() == StepKind::elementwise) continue;
    try {
      make_optimizer(
          type.options,
          {{.parameters = {{"blocks.0.fc.weight", parameter({4, 4}, 1, at::kBFloat16)}}}});
      FAIL() << type.names.front();
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("looks at whole parameters"));
    }
  }
}

}  // namespace
}  // namespace lockstep::optim
