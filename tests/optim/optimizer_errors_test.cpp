#include <cmath>

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

std::string refusal(const OptimizerOptions& options, std::vector<ParameterGroup> groups = {}) {
  return usage_error([&] { make_optimizer(options, std::move(groups)); });
}

std::string refusal(std::vector<NamedParameter> parameters) {
  return refusal(AdamWOptions{}, {{.parameters = std::move(parameters)}});
}

TEST(OptimizerErrors, OptionsThatMakeNoSense) {
  EXPECT_THAT(refusal(AdamWOptions{.betas = {1.0, 0.9}}), HasSubstr("betas[0] is 1"));
  EXPECT_THAT(refusal(AdamWOptions{.betas = {0.9, -0.5}}), HasSubstr("betas[1] is -0.5"));
  EXPECT_THAT(refusal(AdamWOptions{.betas = {0.9, std::nan("")}}), HasSubstr("betas[1] is nan"));
  EXPECT_THAT(refusal(AdamWOptions{.eps = -1}), HasSubstr("eps is -1"));
  EXPECT_THAT(refusal(SGDOptions{.momentum = -0.5}), HasSubstr("momentum is -0.5"));
  EXPECT_THAT(refusal(SGDOptions{.momentum = 0.9, .dampening = 0.25, .nesterov = true}),
              AllOf(HasSubstr("nesterov"), HasSubstr("is 0.9 and dampening 0.25")));
  EXPECT_THAT(refusal(LionOptions{.betas = {0.9, 1.5}}), HasSubstr("Lion: betas[1] is 1.5"));
  EXPECT_THAT(refusal(AdagradOptions{.eps = 0}), HasSubstr("Adagrad: eps is 0"));
  EXPECT_THAT(refusal(LambOptions{.max_coeff = 0.5, .min_coeff = 2}),
              HasSubstr("Lamb: min_coeff is 2, above max_coeff, which is 0.5"));
  EXPECT_THAT(refusal(MuonOptions{.ns_steps = 0}), HasSubstr("Muon: ns_steps is 0"));
  EXPECT_THAT(refusal(MuonOptions{.muon_lr = 0.02}),
              HasSubstr("Muon: muon_lr is 0.02, but lr is not given"));
  EXPECT_THAT(refusal(SGDOptions{}, {{.weight_decay = -2}}), HasSubstr("weight_decay is -2"));
  EXPECT_THAT(refusal(SGDOptions{}, {{.learning_rate_factor = -2}}),
              HasSubstr("learning_rate_factor is -2"));
}

TEST(OptimizerErrors, ParametersThatItCannotStepOn) {
  EXPECT_THAT(refusal({{"w", at::zeros({2}, at::kLong)}}),
              AllOf(HasSubstr("'w' is Long"), HasSubstr("Float")));
  EXPECT_THAT(refusal({{"w", at::Tensor()}}), HasSubstr("'w' is an undefined tensor"));
  const at::Tensor shared = parameter({2}, 1);
  EXPECT_THAT(refusal({{"embedding", shared}, {"head", shared}}),
              AllOf(HasSubstr("'embedding' and 'head' are one tensor"), HasSubstr("once")));
  EXPECT_THAT(refusal({{"w", parameter({2}, 1)}, {"w", parameter({2}, 2)}}),
              HasSubstr("two parameters are called 'w'"));
  // This holds across groups, too.
  EXPECT_THAT(
      refusal(AdamWOptions{}, {{.parameters = {{"a", shared}}}, {.parameters = {{"b", shared}}}}),
      HasSubstr("'a' and 'b' are one tensor"));
}

TEST(OptimizerErrors, LearningRatesThatAreNone) {
  const auto optimizer = make_optimizer(AdamWOptions{}, {});
  EXPECT_THAT(usage_error([&] { optimizer->step(-0.5); }), HasSubstr("learning rate is -0.5"));
  EXPECT_THAT(usage_error([&] { optimizer->step(std::nan("")); }),
              HasSubstr("learning rate is nan"));
}

// The mistake is in the second parameter; the first must not have changed.
TEST(OptimizerErrors, AStepThatFailsChangesNothing) {
  const at::Tensor first = parameter({4}, 1);
  const at::Tensor second = parameter({4, 3}, 2);
  const at::Tensor before = snapshot(first);
  const auto optimizer =
      make_optimizer(AdamWOptions{}, {{.parameters = {{"first", first}, {"second", second}}}});
  set_gradient(first, numbers({4}, 3));
  const at::Tensor indices = at::zeros({1, 2}, at::kLong);
  set_gradient(second, at::sparse_coo_tensor(indices, at::ones({2, 3}), {4, 3}));
  EXPECT_THAT(usage_error([&] { optimizer->step(0.1); }),
              AllOf(HasSubstr("'second' is sparse"), HasSubstr("sparse(false)")));
  EXPECT_TRUE(same_bits(first, before));
  for (const auto& [name, tensor] : optimizer->state())
    EXPECT_EQ(tensor.abs().sum().item<double>(), 0) << name;
}

TEST(OptimizerErrors, AModelThatWasConvertedBehindItsBack) {
  at::Tensor weight = parameter({4}, 1);
  const auto optimizer = make_optimizer(AdamWOptions{}, {{.parameters = {{"w", weight}}}});
  weight.set_data(weight.detach().to(at::kDouble));
  EXPECT_THAT(usage_error([&] { optimizer->step(0.1); }),
              AllOf(HasSubstr("'w' is Double [4] on cpu"), HasSubstr("was Float [4] on cpu")));
}

}  // namespace
}  // namespace lockstep::optim
