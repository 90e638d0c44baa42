// The keys of zero_optimization about offload and ZeRO++.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/configs.h"

namespace lockstep::train {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(OffloadKeys, are_of_the_strategies_that_cut) {
  for (const char* strategy : {"SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"}) {
    const TrainConfig config = config_with(
        {{"/sharding_strategy", strategy},
         {"/zero_optimization/offload_optimizer", {{"device", "cpu"}, {"pin_memory", true}}}});
    EXPECT_EQ(config.sharding.offload_optimizer, OffloadDevice::cpu) << strategy;
    EXPECT_EQ(config.sharding.offload_param, OffloadDevice::none) << strategy;
  }
  const TrainConfig both = config_with({{"/zero_optimization/stage", 3},
                                        {"/zero_optimization/offload_optimizer/device", "CPU"},
                                        {"/zero_optimization/offload_param/device", "cpu"}});
  EXPECT_EQ(both.sharding.offload_optimizer, OffloadDevice::cpu);
  EXPECT_EQ(both.sharding.offload_param, OffloadDevice::cpu);
}

TEST(OffloadKeys, that_the_strategy_does_not_have_are_mistakes) {
  for (const char* strategy : {"NO_SHARD", "SHARD_OPTIMIZER"})
    EXPECT_EQ(mistake_with({{"/sharding_strategy", strategy},
                            {"/zero_optimization/offload_optimizer/device", "cpu"}}),
              std::string("gpt.json:1: zero_optimization.offload_optimizer.device is \"cpu\", but "
                          "with the sharding_strategy \"") +
                  strategy +
                  "\" gradients are whole on every rank's device: take \"SHARD_GRAD_OP\" "
                  "(zero_optimization.stage 2), \"FULL_SHARD\" (3) or \"HYBRID_SHARD\", or set it "
                  "to \"none\"");
}

// Below stage 3, parameters are whole on every rank's device, as in DeepSpeed.
TEST(OffloadKeys, of_parameters_have_no_effect_below_stage_3) {
  const auto changes = {Change{"/zero_optimization/stage", 2},
                        Change{"/zero_optimization/offload_optimizer/device", "cpu"},
                        Change{"/zero_optimization/offload_param/device", "cpu"}};
  const ConfigDraft draft = draft_with(changes);
  EXPECT_EQ(draft.config().sharding.offload_param, OffloadDevice::none);
  EXPECT_EQ(draft.config().sharding.offload_optimizer, OffloadDevice::cpu);
  EXPECT_THAT(draft.without_effect(), ElementsAre("zero_optimization.offload_param"));
}

TEST(OffloadKeys, of_parameters_take_the_optimizer_along) {
  const ConfigDraft alone = draft_with(
      {{"/zero_optimization/stage", 3}, {"/zero_optimization/offload_param/device", "cpu"}});
  EXPECT_EQ(alone.config().sharding.offload_param, OffloadDevice::cpu);
  EXPECT_EQ(alone.config().sharding.offload_optimizer, OffloadDevice::cpu);
  EXPECT_THAT(alone.without_effect(), IsEmpty());
  const ConfigDraft refused = draft_with({{"/zero_optimization/stage", 3},
                                          {"/zero_optimization/offload_param/device", "cpu"},
                                          {"/zero_optimization/offload_optimizer/device", "none"}});
  EXPECT_EQ(refused.config().sharding.offload_optimizer, OffloadDevice::cpu);
  EXPECT_THAT(refused.without_effect(), ElementsAre("zero_optimization.offload_optimizer.device"));
}

TEST(OffloadKeys, do_not_go_to_disks) {
  EXPECT_EQ(mistake_with({{"/zero_optimization/stage", 3},
                          {"/zero_optimization/offload_optimizer",
                           {{"device", "nvme"}, {"nvme_path", "/local"}}}}),
            "gpt.json:1: zero_optimization.offload_optimizer.device is \"nvme\", but nothing is "
            "offloaded to disks here: take \"cpu\", the host's memory, or \"none\"");
  EXPECT_EQ(mistake_with({{"/zero_optimization/offload_param/device", "gpu"}}),
            "gpt.json:1: zero_optimization.offload_param.device is \"gpu\": it must be 'none' or "
            "'cpu'");
}

TEST(OffloadKeys, are_told_from_slips) {
  EXPECT_EQ(mistake_with({{"/zero_optimization/offload_optimizer/devise", "cpu"}}),
            "gpt.json:1: zero_optimization.offload_optimizer.devise is no key of "
            "zero_optimization.offload_optimizer: did you mean 'device'?");
}

TEST(OffloadKeys, have_names_from_before) {
  const TrainConfig config = config_with({{"/zero_optimization/stage", 3},
                                          {"/zero_optimization/cpu_offload", true},
                                          {"/zero_optimization/cpu_offload_param", true},
                                          {"/zero_optimization/cpu_offload_use_pin_memory", true}});
  EXPECT_EQ(config.sharding.offload_optimizer, OffloadDevice::cpu);
  EXPECT_EQ(config.sharding.offload_param, OffloadDevice::cpu);
  EXPECT_EQ(config_with({{"/zero_optimization/cpu_offload", false}}).sharding.offload_optimizer,
            OffloadDevice::none);
  EXPECT_EQ(mistake_with({{"/zero_optimization/stage", 3},
                          {"/zero_optimization/cpu_offload", true},
                          {"/zero_optimization/offload_optimizer/device", "none"}}),
            "gpt.json:1: zero_optimization.cpu_offload is true, but "
            "zero_optimization.offload_optimizer.device is \"none\": set one of them");
}

TEST(ZeroPlusPlusKeys, are_of_the_strategies_that_cut) {
  for (const char* strategy : {"FULL_SHARD", "HYBRID_SHARD"}) {
    const TrainConfig config = config_with({{"/sharding_strategy", strategy},
                                            {"/zero_optimization/zero_quantized_weights", true},
                                            {"/zero_optimization/zero_quantized_gradients", true},
                                            {"/zero_optimization/zero_hpz_partition_size", 8}});
    EXPECT_TRUE(config.sharding.zero_plus_plus.quantized_weights) << strategy;
    EXPECT_TRUE(config.sharding.zero_plus_plus.quantized_gradients) << strategy;
    EXPECT_EQ(config.sharding.zero_plus_plus.hpz_partition_size, 8) << strategy;
  }
  EXPECT_TRUE(config_with({{"/zero_optimization/stage", 2},
                           {"/zero_optimization/zero_quantized_gradients", true}})
                  .sharding.zero_plus_plus.quantized_gradients);
}

TEST(ZeroPlusPlusKeys, that_the_strategy_does_not_have_are_mistakes) {
  EXPECT_EQ(mistake_with({{"/zero_optimization/stage", 2},
                          {"/zero_optimization/zero_quantized_weights", true}}),
            "gpt.json:1: zero_optimization.zero_quantized_weights is true, but with the "
            "sharding_strategy \"SHARD_GRAD_OP\" parameters are whole on every rank: take "
            "\"FULL_SHARD\" (zero_optimization.stage 3) or \"HYBRID_SHARD\", or remove it");
  EXPECT_THAT(mistake_with({{"/zero_optimization/stage", 1},
                            {"/zero_optimization/zero_hpz_partition_size", 8}}),
              HasSubstr("zero_hpz_partition_size is 8, but with the sharding_strategy "
                        "\"SHARD_OPTIMIZER\" parameters are whole"));
  EXPECT_EQ(mistake_with({{"/zero_optimization/zero_quantized_gradients", true}}),
            "gpt.json:1: zero_optimization.zero_quantized_gradients is true, but with the "
            "sharding_strategy \"NO_SHARD\" gradients are whole on every rank: take "
            "\"SHARD_GRAD_OP\" (zero_optimization.stage 2), \"FULL_SHARD\" (3) or "
            "\"HYBRID_SHARD\", or remove it");
  EXPECT_EQ(mistake_with({{"/zero_optimization/zero_hpz_partition_size", 0}}),
            "gpt.json:1: zero_optimization.zero_hpz_partition_size is 0: it must be a whole number "
            "from 1 to 16777216");
}

TEST(OffloadKeys, are_not_judged_by_a_strategy_that_is_not_known) {
  EXPECT_EQ(mistake_with({{"/zero_optimization/stage", 4},
                          {"/zero_optimization/offload_optimizer/device", "cpu"},
                          {"/zero_optimization/zero_quantized_weights", true}}),
            "gpt.json:1: zero_optimization.stage is 4: it must be a whole number from 0 to 3");
}

}  // namespace lockstep::train
