// AdamW with moments of 8 bits beside the one with floats.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/optim/kernels/block_codes.h>
#include <lockstep/optim/optimizer.h>

#include "../base/errors.h"
#include "tensors.h"

namespace lockstep::optim {
namespace {

using ::testing::HasSubstr;
using testing::numbers;
using testing::parameter;
using testing::same_bits;
using testing::set_gradient;
using testing::snapshot;

constexpr double kRate = 0.01;

std::unique_ptr<Optimizer> make(const OptimizerOptions& options, const at::Tensor& weight) {
  return make_optimizer(options, {{.parameters = {{"weight", weight}}, .weight_decay = 0.1}});
}

at::Tensor state_of(const Optimizer& optimizer, const std::string& name) {
  for (const NamedTensor& one : optimizer.state())
    if (one.name == name) return one.tensor;
  return {};
}

// What a tensor becomes in codes, block by block.
at::Tensor rounded_to_codes(const at::Tensor& values, CodeMap map) {
  const at::Tensor flat = values.reshape({-1}).contiguous(), result = at::empty_like(flat);
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kCodeBlock) {
    const std::int64_t count = std::min(kCodeBlock, flat.numel() - begin);
    const float* const from = flat.data_ptr<float>() + begin;
    std::vector<std::uint8_t> codes(kCodeBlock);
    const float scale = encode(map, from, count, scale_of(from, count), codes.data());
    decode(map, codes.data(), count, scale, result.data_ptr<float>() + begin);
  }
  return result.view(values.sizes());
}

// The next step begins from moments in codes; the weights move by those that are not rounded yet.
TEST(AdamW8bit, IsAdamWWhoseMomentsAreRoundedAfterEachStep) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const at::Tensor weight = parameter({37, 41}, 3, type), other = parameter({37, 41}, 3, type);
    const auto eight = make(AdamW8bitOptions{}, weight), floats = make(AdamWOptions{}, other);
    for (std::uint64_t step = 0; step < 5; ++step) {
      set_gradient(weight, numbers({37, 41}, 10 + step, type));
      set_gradient(other, numbers({37, 41}, 10 + step, type));
      eight->step(kRate);
      floats->step(kRate);
      EXPECT_TRUE(same_bits(weight, other)) << step;
      std::vector<NamedTensor> state = floats->state();
      for (auto& [name, tensor] : state) {
        if (name.starts_with("exp_avg."))
          tensor.copy_(rounded_to_codes(tensor.to(at::kFloat), CodeMap::with_sign));
        if (name.starts_with("exp_avg_sq."))
          tensor.copy_(rounded_to_codes(tensor.to(at::kFloat), CodeMap::without_sign));
        EXPECT_TRUE(at::equal(tensor, state_of(*eight, name).to(tensor.scalar_type()))) << name;
      }
    }
  }
}

TEST(AdamW8bit, HoldsTwoBytesForEachElementAndTwoFloatsForEachBlock) {
  const at::Tensor weight = parameter({1000}, 3);
  EXPECT_EQ(make(AdamW8bitOptions{}, weight)->state_bytes(), 2 * 1000 + 2 * 4 * 4 + 8);
  EXPECT_EQ(make(AdamWOptions{}, weight)->state_bytes(), 8 * 1000 + 8);
}

TEST(AdamW8bit, TakesItsStateAndThatOfAdamW) {
  const at::Tensor weight = parameter({700}, 3), other = parameter({700}, 3);
  const auto one = make(AdamW8bitOptions{}, weight), two = make(AdamW8bitOptions{}, other);
  for (std::uint64_t step = 0; step < 3; ++step) {
    set_gradient(weight, numbers({700}, 20 + step));
    one->step(kRate);
  }
  two->load_state(one->state());
  for (const NamedTensor& saved : one->state())
    EXPECT_TRUE(same_bits(state_of(*two, saved.name), saved.tensor)) << saved.name;
  {
    const c10::NoGradGuard no_grad;
    other.copy_(weight);
  }
  set_gradient(weight, numbers({700}, 30));
  set_gradient(other, numbers({700}, 30));
  one->step(kRate);
  two->step(kRate);
  EXPECT_TRUE(same_bits(weight, other));
  const auto floats = make(AdamWOptions{}, other);
  floats->load_state(one->state());
  floats->step(kRate);
  two->load_state(floats->state());
  EXPECT_TRUE(at::allclose(state_of(*two, "exp_avg.weight"), state_of(*floats, "exp_avg.weight"),
                           0.1, 0.02));
}

TEST(AdamW8bit, RefusesWeightsOfSixteenBits) {
  EXPECT_THAT(usage_error([] { make(AdamW8bitOptions{}, parameter({8}, 1, at::kBFloat16)); }),
              HasSubstr("keep the weights in Float"));
}

}  // namespace
}  // namespace lockstep::optim
