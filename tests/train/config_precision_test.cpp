#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/configs.h"

namespace lockstep::train {

using ::testing::HasSubstr;

TEST(PrecisionKeys, leave_a_run_in_fp32) {
  const PrecisionSection precision = config_with({}).precision;
  EXPECT_EQ(precision.compute, Precision::fp32);
  EXPECT_EQ(precision.gradients, Precision::fp32);
}

TEST(PrecisionKeys, take_bf16_by_both_its_names_with_every_strategy) {
  for (const char* key : {"/bf16/enabled", "/bfloat16/enabled"})
    for (int stage = 0; stage < 4; ++stage)
      EXPECT_EQ(config_with({{key, true}, {"/zero_optimization/stage", stage}}).precision.compute,
                Precision::bf16)
          << key << " " << stage;
  EXPECT_EQ(config_with({{"/bf16", {{"enabled", true}, {"check_grad_overflow", true}}}})
                .precision.compute,
            Precision::bf16);
}

TEST(PrecisionKeys, take_fp16_and_its_loss_scale) {
  const PrecisionSection defaults = config_with({{"/fp16/enabled", true}}).precision;
  EXPECT_EQ(defaults.compute, Precision::fp16);
  EXPECT_EQ(defaults.loss_scale.loss_scale, 0);
  EXPECT_EQ(defaults.loss_scale.initial_scale_power, 16);
  EXPECT_EQ(defaults.loss_scale.loss_scale_window, 1000);
  EXPECT_EQ(defaults.loss_scale.hysteresis, 2);
  EXPECT_FALSE(defaults.loss_scale.consecutive_hysteresis);
  EXPECT_EQ(defaults.loss_scale.min_loss_scale, 1);
  const PrecisionSection given = config_with({{"/fp16",
                                               {{"enabled", true},
                                                {"auto_cast", false},
                                                {"loss_scale", 0},
                                                {"initial_scale_power", 20},
                                                {"loss_scale_window", 50},
                                                {"hysteresis", 3},
                                                {"consecutive_hysteresis", true},
                                                {"min_loss_scale", 0.25}}}})
                                     .precision;
  EXPECT_EQ(given.loss_scale.initial_scale_power, 20);
  EXPECT_EQ(given.loss_scale.loss_scale_window, 50);
  EXPECT_EQ(given.loss_scale.hysteresis, 3);
  EXPECT_TRUE(given.loss_scale.consecutive_hysteresis);
  EXPECT_EQ(given.loss_scale.min_loss_scale, 0.25);
}

TEST(PrecisionKeys, allow_one_type_a_run) {
  EXPECT_EQ(mistake_with({{"/bf16/enabled", true}, {"/fp16/enabled", true}}),
            "gpt.json:1: bf16.enabled is true, and so is fp16.enabled: a run has one of them");
  EXPECT_EQ(mistake_with({{"/bfloat16/enabled", true}, {"/fp16/enabled", true}}),
            "gpt.json:1: bfloat16.enabled is true, and so is fp16.enabled: a run has one of them");
}

TEST(PrecisionKeys, have_ranges) {
  EXPECT_EQ(mistake_with({{"/fp16/enabled", "yes"}}),
            "gpt.json:1: fp16.enabled is \"yes\": it must be true or false");
  EXPECT_EQ(mistake_with({{"/fp16/initial_scale_power", 128}}),
            "gpt.json:1: fp16.initial_scale_power is 128: it must be a whole number from 0 to 127");
  EXPECT_THAT(mistake_with({{"/fp16/loss_scale", -1}}), HasSubstr("fp16.loss_scale is -1"));
  EXPECT_THAT(mistake_with({{"/fp16/loss_scale_window", 0}}),
              HasSubstr("fp16.loss_scale_window is 0: it must be a whole number from 1"));
  EXPECT_THAT(mistake_with({{"/fp16/hysteresis", 0}}), HasSubstr("fp16.hysteresis is 0"));
  EXPECT_THAT(mistake_with({{"/fp16/min_loss_scale", 0}}), HasSubstr("fp16.min_loss_scale is 0"));
  EXPECT_EQ(
      mistake_with(
          {{"/fp16", {{"enabled", true}, {"initial_scale_power", 3}, {"min_loss_scale", 16}}}}),
      "gpt.json:1: fp16.min_loss_scale does not fit the others: min_loss_scale is 16: give a "
      "number above 0, up to the 8 that initial_scale_power 3 starts with");
}

TEST(PrecisionKeys, leave_no_weights_in_fp32) {
  const auto read = config_with({{"/bf16/enabled", true},
                                 {"/bf16/bf16_master_weights_and_grads", true},
                                 {"/bf16/bf16_optimizer_states", true},
                                 {"/bf16/stochastic_rounding", false},
                                 {"/zero_optimization/stage", 3}})
                        .precision;
  EXPECT_TRUE(read.narrow_masters && read.narrow_states && !read.stochastic_rounding);
  EXPECT_TRUE(config_with({{"/fp16/enabled", true},
                           {"/fp16/fp16_master_weights_and_grads", true},
                           {"/zero_optimization/stage", 2}})
                  .precision.narrow_masters);
  EXPECT_FALSE(config_with({{"/bf16/enabled", true}}).precision.narrow_masters);
}

TEST(PrecisionKeys, that_have_no_weights_to_keep_in_16_bits_are_mistakes) {
  EXPECT_EQ(mistake_with(
                {{"/fp16/fp16_master_weights_and_grads", true}, {"/zero_optimization/stage", 3}}),
            "gpt.json:1: fp16.fp16_master_weights_and_grads is true, and fp16.enabled is not: set "
            "that, too");
  EXPECT_EQ(mistake_with({{"/bf16/enabled", true}, {"/bf16/bf16_master_weights_and_grads", true}}),
            "gpt.json:1: bf16.bf16_master_weights_and_grads is true, but with the "
            "sharding_strategy \"NO_SHARD\" weights are the model's own, in fp32: take "
            "\"SHARD_GRAD_OP\" (zero_optimization.stage 2), \"FULL_SHARD\" (3) or "
            "\"HYBRID_SHARD\", or remove it");
  EXPECT_THAT(mistake_with({{"/bf16/enabled", true},
                            {"/bf16/bf16_master_weights_and_grads", true},
                            {"/optimizer/type", "Lamb"},
                            {"/zero_optimization/stage", 3}}),
              HasSubstr("looks at whole parameters, which it does in fp32"));
  EXPECT_THAT(mistake_with({{"/bf16/enabled", true},
                            {"/bf16/bf16_optimizer_states", true},
                            {"/zero_optimization/stage", 3}}),
              HasSubstr("bf16.bf16_optimizer_states is true, and bf16_master_weights_and_grads is "
                        "not"));
  EXPECT_THAT(mistake_with({{"/bfloat16/bf16_master_weights_and_grads", true}}),
              HasSubstr("write all of it there"));
  EXPECT_THAT(mistake_with({{"/bf16/check_grad_overflow", false}}),
              HasSubstr("bf16.check_grad_overflow is false, but gradients are always looked at"));
  EXPECT_THAT(mistake_with({{"/bf16/enabeld", true}}), HasSubstr("did you mean 'enabled'?"));
}

TEST(PrecisionKeys, say_what_gradients_travel_in) {
  EXPECT_EQ(config_with({{"/communication_data_type", "bf16"}, {"/zero_optimization/stage", 2}})
                .precision.gradients,
            Precision::bf16);
  EXPECT_EQ(
      config_with({{"/communication_data_type", "fp16"}, {"/sharding_strategy", "FULL_SHARD"}})
          .precision.gradients,
      Precision::fp16);
  EXPECT_EQ(config_with({{"/communication_data_type", "fp32"}}).precision.gradients,
            Precision::fp32);
  EXPECT_EQ(mistake_with({{"/communication_data_type", "fp8"}}),
            "gpt.json:1: communication_data_type is \"fp8\": it must be 'fp32', 'bf16' or 'fp16'");
  EXPECT_EQ(mistake_with({{"/communication_data_type", "bf16"}, {"/zero_optimization/stage", 1}}),
            "gpt.json:1: communication_data_type is \"bf16\", but with the sharding_strategy "
            "\"SHARD_OPTIMIZER\" gradients travel in fp32: take \"SHARD_GRAD_OP\" "
            "(zero_optimization.stage 2), \"FULL_SHARD\" (3) or \"HYBRID_SHARD\", or remove it");
}

}  // namespace lockstep::train
