#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/optim/registry/optimizers.h>
#include <lockstep/optim/registry/registry.h>

#include "tests/train/configs.h"

namespace lockstep::train {

namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

json scheduler_of(const TrainConfig& config) { return json::parse(to_json(config))["scheduler"]; }

}  // namespace

TEST(Scheduler, takes_its_defaults_from_the_optimizer_and_the_run) {
  EXPECT_EQ(scheduler_of(config_with({{"/scheduler/type", "WarmupLR"}})),
            json::parse(R"({"type": "WarmupLR", "params": {"warmup_min_lr": 0.0,
              "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}})"));
  EXPECT_EQ(scheduler_of(config_with(
                {{"/scheduler/type", "WarmupDecayLR"},
                 {"/scheduler/params/total_num_steps", "auto"},
                 {"/scheduler/params/warmup_num_steps", 5}}))["params"]["total_num_steps"],
            10);
  EXPECT_EQ(scheduler_of(config_with({{"/scheduler/type", "OneCycle"},
                                      {"/scheduler/params/cycle_min_lr", 0.25},
                                      {"/scheduler/params/cycle_max_lr", 0.5}})),
            json::parse(R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.25,
              "cycle_max_lr": 0.5, "decay_lr_rate": 0.0, "cycle_first_step_size": 2000,
              "cycle_second_step_size": 2000, "decay_step_size": 0}})"));
  const json range = {{"type", "LRRangeTest"},
                      {"params",
                       {{"lr_range_test_min_lr", 0.5},
                        {"lr_range_test_step_size", 3},
                        {"lr_range_test_step_rate", 2.0},
                        {"lr_range_test_staircase", true}}}};
  EXPECT_EQ(scheduler_of(config_with({{"/scheduler", range}})), range);
}

TEST(Scheduler, waits_for_the_data_where_only_epochs_are_given) {
  const TrainConfig config =
      config_with({{"/max_steps", nullptr}, {"/epochs", 2}, {"/scheduler/type", "WarmupCosineLR"}});
  EXPECT_EQ(config.scheduler.as<optim::WarmupCosineLR>()->total_num_steps, 0);
  EXPECT_EQ(scheduler_of(config)["params"]["total_num_steps"], "auto");
}

TEST(Scheduler, says_what_is_wrong_with_its_parameters) {
  EXPECT_EQ(
      mistake_with({{"/scheduler/type", "WarmupDecayLR"}}),
      "gpt.json:1: scheduler.params.warmup_num_steps is left out, and its default, 1000, is more "
      "than all 10 steps (total_num_steps, or else max_steps): set it, for example to 1");
  EXPECT_EQ(mistake_with(
                {{"/scheduler/type", "WarmupDecayLR"}, {"/scheduler/params/warmup_num_steps", 11}}),
            "gpt.json:1: scheduler.params do not fit together: WarmupDecayLR: warmup_num_steps is "
            "11, more than total_num_steps, which is 10: the warm-up would never end");
  EXPECT_EQ(mistake_with({{"/scheduler/type", "Cosine"}, {"/scheduler/params/x", 1}}),
            "gpt.json:1: scheduler.type is \"Cosine\": it must be 'WarmupLR', 'WarmupDecayLR', "
            "'WarmupCosineLR', 'OneCycle', 'LRRangeTest' or 'Constant'");
  EXPECT_THAT(mistake_with({{"/scheduler/type", "Warm"},
                            {"/scheduler/params/warmup_num_steps", -5},
                            {"/scheduler/params/cycle_min_lr", "x"}}),
              AllOf(HasSubstr("3 mistakes"), HasSubstr("scheduler.type is \"Warm\""),
                    HasSubstr("warmup_num_steps is -5"), HasSubstr("cycle_min_lr is \"x\"")));
  EXPECT_EQ(
      mistake_with({{"/scheduler/type", "WarmupLR"}, {"/scheduler/params/total_num_steps", 9}}),
      "gpt.json:1: scheduler.params.total_num_steps is no key of WarmupLR: did you mean "
      "'warmup_num_steps'?");
  EXPECT_THAT(mistake_with({{"/scheduler/params/warmup_num_steps", 9}}),
              HasSubstr("scheduler.type is missing"));
}

TEST(Optimizer, has_the_keys_and_defaults_of_its_type) {
  const auto optimizer_of = [](const TrainConfig& config) {
    return json::parse(to_json(config))["optimizer"];
  };
  EXPECT_EQ(optimizer_of(config_with({{"/optimizer/type", "DeepSpeedCPULion"},
                                      {"/optimizer/params/weight_decay", 0.5}})),
            json::parse(R"({"type": "Lion", "params": {"lr": 0.001, "weight_decay": 0.5,
              "betas": [0.9, 0.99]}})"));
  EXPECT_EQ(optimizer_of(config_with(
                {{"/optimizer/type", "adagrad"}, {"/optimizer/params/lr_decay", 0.25}})),
            json::parse(R"({"type": "Adagrad", "params": {"lr": 0.001, "weight_decay": 0.0,
              "eps": 1e-10, "lr_decay": 0.25}})"));
  const TrainConfig lamb = config_with({{"/optimizer/type", "Lamb"},
                                        {"/optimizer/params/max_coeff", 0.5},
                                        {"/optimizer/params/amsgrad", false}});
  EXPECT_EQ(lamb.optimizer.options.as<optim::LambOptions>()->max_coeff, 0.5);
  EXPECT_EQ(lamb.optimizer.options.as<optim::LambOptions>()->min_coeff, 0.01);
  EXPECT_EQ(to_json(parse_config(to_json(lamb), {})), to_json(lamb));
}

// As DeepSpeed's config has it; a schedule changes both learning rates in proportion to lr.
TEST(Optimizer, muon_has_two_learning_rates) {
  const TrainConfig config = config_with({{"/optimizer/type", "Muon"},
                                          {"/optimizer/params/momentum", 0.9},
                                          {"/optimizer/params/ns_method", "gram"},
                                          {"/optimizer/params/muon_lr", 0.02}});
  const auto* muon = config.optimizer.options.as<optim::MuonOptions>();
  ASSERT_NE(muon, nullptr);
  EXPECT_EQ(muon->momentum, 0.9);
  EXPECT_EQ(muon->muon_lr, 0.02);
  EXPECT_FALSE(muon->adam_lr);
  EXPECT_EQ(muon->lr, config.optimizer.lr);
  EXPECT_EQ(to_json(parse_config(to_json(config), {})), to_json(config));
  EXPECT_THAT(mistake_with({{"/optimizer/type", "Muon"}, {"/optimizer/params/muon_lr", 0}}),
              HasSubstr("optimizer.params.muon_lr is 0: it must be above 0"));
  EXPECT_THAT(mistake_with({{"/optimizer/type", "Muon"}, {"/parallel/tensor", 2}}),
              HasSubstr("optimizer.type is \"Muon\", which looks at whole parameters"));
}

TEST(Optimizer, has_moments_of_8_bits) {
  const TrainConfig config =
      config_with({{"/optimizer/type", "adamw8bit"}, {"/optimizer/params/betas", {0.8, 0.9}}});
  const auto* const eight = config.optimizer.options.as<optim::AdamW8bitOptions>();
  ASSERT_NE(eight, nullptr);
  EXPECT_EQ(eight->betas[1], 0.9);
  EXPECT_EQ(to_json(parse_config(to_json(config), {})), to_json(config));
  EXPECT_THAT(
      mistake_with({{"/optimizer/type", "AdamW8bit"}, {"/optimizer/params/adam_w_mode", false}}),
      HasSubstr("optimizer.type is \"AdamW8bit\": use the type \"Adam8bit\""));
  EXPECT_THAT(mistake_with({{"/optimizer/type", "Adam8bit"}, {"/parallel/tensor", 2}}),
              HasSubstr("optimizer.type is \"Adam8bit\", which looks at whole parameters"));
}

TEST(Optimizer, says_what_its_type_does_not_have) {
  EXPECT_EQ(mistake_with({{"/optimizer/params/max_grad_norm", 1.0}}),
            "gpt.json:1: optimizer.params.max_grad_norm does not belong there: use "
            "gradient_clipping, at the top of the config");
  EXPECT_EQ(
      mistake_with({{"/optimizer/type", "OneBitAdam"}, {"/optimizer/params/x", 1}}),
      "gpt.json:1: optimizer.type is \"OneBitAdam\": it must be 'AdamW', 'Adam', 'AdamW8bit', "
      "'Adam8bit', 'SGD', 'Lion', 'Adagrad', 'Lamb', 'Muon', 'FusedAdam', 'DeepSpeedCPUAdam', "
      "'FusedLion', "
      "'DeepSpeedCPULion', 'DeepSpeedCPUAdagrad' or 'FusedLamb'");
  EXPECT_THAT(mistake_with({{"/optimizer/type", "SGD"}, {"/optimizer/params/betas", {0.9, 0.9}}}),
              HasSubstr("optimizer.params.betas is no key of SGD: its keys are lr, weight_decay, "
                        "momentum, dampening, nesterov"));
  EXPECT_THAT(mistake_with({{"/optimizer/type", "Lamb"}, {"/optimizer/params/min_coeff", 20}}),
              HasSubstr("optimizer.params.min_coeff is 20, above max_coeff, which is 10"));
  EXPECT_THAT(mistake_with({{"/optimizer/type", "Lamb"}, {"/parallel/tensor", 2}}),
              HasSubstr("optimizer.type is \"Lamb\", which looks at whole parameters, and "
                        "parallel.tensor is 2, which cuts them"));
  // Mistakes that do not depend on the type are reported in the same round.
  EXPECT_THAT(mistake_with({{"/optimizer/type", "AdamX"},
                            {"/optimizer/params/lr", -1},
                            {"/optimizer/params/eps", -1},
                            {"/optimizer/params/momentum", 7}}),
              AllOf(HasSubstr("4 mistakes"), HasSubstr("optimizer.type is \"AdamX\""),
                    HasSubstr("params.lr is -1"), HasSubstr("params.eps is -1"),
                    HasSubstr("params.momentum is 7")));
  EXPECT_EQ(mistake_with({{"/optimizer/type", "SGD"}, {"/optimizer/params/nesterov", true}}),
            "gpt.json:1: optimizer.params.nesterov is true, but momentum is 0 and dampening 0: it "
            "needs a momentum above 0 and no dampening");
  EXPECT_EQ(mistake_with({{"/optimizer/params/adam_w_mode", false}}),
            "gpt.json:1: optimizer.params.adam_w_mode is false, but optimizer.type is \"AdamW\": "
            "use the type \"Adam\" for decay that is part of the gradient");
  EXPECT_EQ(mistake_with({{"/optimizer/params/amsgrad", true}}),
            "gpt.json:1: optimizer.params.amsgrad is true: there is no AMSGrad here; remove it");
  EXPECT_EQ(usage_error([] {
              json config = least();
              config["optimizer"]["params"].erase("lr");
              parse_config(config.dump(), {.name = "gpt.json"});
            }),
            "gpt.json:1: optimizer.params.lr is missing: the learning rate, for example 3e-4");
}

struct MineOptions {
  double push = 0.5;

  static constexpr optim::StepKind kKind = optim::StepKind::elementwise;
  void describe(optim::OptionKeys& keys) {
    keys.number({.name = "push", .meaning = "how far"}, push, {.highest = 2});
  }
  std::vector<std::string> state_names() const { return {"a"}; }
};

// The type is registered for the rest of the process, so this test is the last.
TEST(OptimizerOfAProgram, is_named_in_configs) {
  optim::register_optimizer_type({{"Mine"}, MineOptions{}});
  const TrainConfig config =
      config_with({{"/optimizer/type", "mine"}, {"/optimizer/params/push", 1.5}});
  EXPECT_EQ(config.optimizer.type, "Mine");
  EXPECT_EQ(config.optimizer.options.as<MineOptions>()->push, 1.5);
  EXPECT_EQ(mistake_with({{"/optimizer/type", "Mine"}, {"/optimizer/params/push", 3}}),
            "gpt.json:1: optimizer.params.push is 3: it must be from 0 to 2");
  EXPECT_THAT(
      mistake_with({{"/optimizer/type", "Mine"}, {"/optimizer/params/betas", 3}}),
      HasSubstr("optimizer.params.betas is no key of Mine: its keys are lr, weight_decay, push"));
}

}  // namespace lockstep::train
