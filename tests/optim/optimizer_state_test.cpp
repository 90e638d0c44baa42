// The state of an optimizer that a checkpoint saves, and training that goes on from it.
#include <algorithm>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/optim/optimizer.h>

#include "../base/errors.h"
#include "tensors.h"

namespace lockstep::optim {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::numbers;
using testing::parameter;
using testing::same_bits;
using testing::set_gradient;
using testing::snapshot;

std::vector<NamedParameter> model() {
  return {{"w", parameter({6, 5}, 1)}, {"b", parameter({5}, 2)}};
}

// `b` has no gradient in the first step, so its own count of steps is one behind.
void train(Optimizer& optimizer, const std::vector<NamedParameter>& parameters,
           std::uint64_t first_step, std::uint64_t last_step) {
  for (std::uint64_t step = first_step; step < last_step; ++step) {
    optimizer.zero_grad();
    for (std::size_t i = step == 0 ? 1 : 2; i-- > 0;)
      set_gradient(parameters[i].tensor,
                   numbers(parameters[i].tensor.sizes(), 100 + 10 * step + i));
    optimizer.step(0.05);
  }
}

std::vector<std::string> names_of(const std::vector<NamedTensor>& state) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  return names;
}

std::vector<NamedTensor> copy_of(const std::vector<NamedTensor>& state) {
  std::vector<NamedTensor> copy;
  for (const auto& [name, tensor] : state) copy.push_back({name, tensor.clone()});
  return copy;
}

TEST(OptimizerState, NamesEveryTensor) {
  EXPECT_THAT(
      names_of(make_optimizer(AdamWOptions{}, {{.parameters = model()}})->state()),
      ElementsAre("step.w", "exp_avg.w", "exp_avg_sq.w", "step.b", "exp_avg.b", "exp_avg_sq.b"));
  EXPECT_THAT(
      names_of(make_optimizer(SGDOptions{.momentum = 0.9}, {{.parameters = model()}})->state()),
      ElementsAre("step.w", "momentum_buffer.w", "step.b", "momentum_buffer.b"));
  EXPECT_THAT(names_of(make_optimizer(SGDOptions{}, {{.parameters = model()}})->state()),
              ElementsAre("step.w", "step.b"));
}

TEST(OptimizerState, CountsTheStepsOfEachParameter) {
  const auto parameters = model();
  const auto optimizer = make_optimizer(AdamWOptions{}, {{.parameters = parameters}});
  train(*optimizer, parameters, 0, 3);
  const auto state = optimizer->state();
  EXPECT_EQ(state[0].tensor.item<std::int64_t>(), 3);
  EXPECT_EQ(state[3].tensor.item<std::int64_t>(), 2);
}

TEST(OptimizerState, ARunThatResumesGoesOnToTheBit) {
  std::vector<OptimizerOptions> kinds = {SGDOptions{.momentum = 0.9, .dampening = 0.5}};
  for (const OptimizerType& type : optimizer_types()) kinds.push_back(type.options);
  for (const OptimizerOptions& options : kinds) {
    const auto straight = model();
    const auto optimizer = make_optimizer(options, {{.parameters = straight, .weight_decay = 0.1}});
    train(*optimizer, straight, 0, 2);
    auto saved = copy_of(optimizer->state());
    std::vector<NamedParameter> resumed;
    for (const auto& [name, tensor] : straight)
      resumed.push_back({name, snapshot(tensor).set_requires_grad(true)});
    train(*optimizer, straight, 2, 5);

    const auto second = make_optimizer(options, {{.parameters = resumed, .weight_decay = 0.1}});
    std::reverse(saved.begin(), saved.end());
    second->load_state(saved);
    // Loading makes a copy.
    for (const auto& [name, tensor] : saved) tensor.zero_();
    train(*second, resumed, 2, 5);
    for (std::size_t i = 0; i < straight.size(); ++i)
      EXPECT_TRUE(same_bits(straight[i].tensor, resumed[i].tensor)) << straight[i].name;
  }
}

TEST(OptimizerState, AnotherOnesIsRefusedWithWhatDiffersAndChangesNothing) {
  const auto optimizer = make_optimizer(AdamWOptions{}, {{.parameters = model()}});
  const auto refusal = [&](const std::function<void(std::vector<NamedTensor>&)>& change) {
    auto state = copy_of(optimizer->state());
    for (const auto& [name, tensor] : state) tensor.fill_(7);
    change(state);
    const std::string text = usage_error([&] { optimizer->load_state(state); });
    for (const auto& [name, tensor] : optimizer->state())
      EXPECT_EQ(tensor.abs().sum().item<double>(), 0) << name;
    return text;
  };
  EXPECT_THAT(refusal([](auto& state) { state.erase(state.begin() + 1); }),
              HasSubstr("'exp_avg.w' is missing"));
  EXPECT_THAT(refusal([](auto& state) {
                state[2].tensor = at::ones({5, 6});
              }),
              HasSubstr("'exp_avg_sq.w' is Float [5, 6] instead of Float [6, 5]"));
  EXPECT_THAT(refusal([](auto& state) {
                state[1].tensor = at::ones({6, 5}, at::kDouble);
              }),
              HasSubstr("'exp_avg.w' is Double [6, 5] instead of Float [6, 5]"));
  EXPECT_THAT(refusal([](auto& state) { state[0].tensor = at::ones({}); }),
              HasSubstr("'step.w' is Float [] instead of Long []"));
  EXPECT_THAT(refusal([](auto& state) {
                state.push_back({"exp_avg.x", at::ones({1})});
              }),
              HasSubstr("'exp_avg.x' is unknown"));
  EXPECT_THAT(refusal([](auto& state) { state.push_back(state[1]); }),
              HasSubstr("'exp_avg.w' is there twice"));
  EXPECT_THAT(refusal([](auto& state) { state[4].tensor = at::Tensor(); }),
              HasSubstr("'exp_avg.b' is missing"));
  EXPECT_THAT(refusal([](auto& state) { state[3].tensor.fill_(-4); }), HasSubstr("-4 as step.b"));
  // Long lists of names are cut short.
  EXPECT_THAT(refusal([](auto& state) {
                for (auto& [name, tensor] : state) name += "_of_another";
              }),
              AllOf(HasSubstr("'step.w' is missing"), HasSubstr("and 7 more")));
}

}  // namespace
}  // namespace lockstep::optim
