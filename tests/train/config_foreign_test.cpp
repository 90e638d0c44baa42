#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/configs.h"

namespace lockstep::train {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(DeepSpeedKeys, are_accepted_where_they_ask_for_nothing) {
  const TrainConfig config = config_with(
      {{"/fp16", {{"enabled", false}, {"loss_scale", 0}, {"initial_scale_power", 16}}},
       {"/bf16", {{"enabled", "auto"}}},
       {"/zero_optimization",
        {{"stage", 0},
         {"reduce_bucket_size", 5e8},
         {"offload_optimizer", {{"device", "none"}, {"pin_memory", true}, {"ratio", 1.0}}},
         {"offload_param", {{"device", "none"}, {"nvme_path", "/local"}}},
         {"zero_hpz_partition_size", 1}}},
       {"/activation_checkpointing",
        {{"partition_activations", false}, {"number_checkpoints", nullptr}}},
       {"/flops_profiler", {{"enabled", false}, {"profile_step", 1}}},
       {"/prescale_gradients", false},
       {"/gradient_predivide_factor", 1.0},
       {"/communication_data_type", "fp32"},
       {"/autotuning", {{"enabled", false}, {"anything", 1}}},
       {"/memory_breakdown", false}});
  EXPECT_EQ(to_json(config), to_json(config_with({})));
}

TEST(DeepSpeedKeys, that_ask_for_what_this_build_cannot_do_are_mistakes) {
  EXPECT_EQ(mistake_with({{"/amp/enabled", true}}),
            "gpt.json:1: amp.enabled is true, but this build has no Apex (bf16 and fp16 are its "
            "ways to 16 bits): set it to false, or leave the section out");
  EXPECT_EQ(mistake_with({{"/activation_checkpointing/partition_activations", true}}),
            "gpt.json:1: activation_checkpointing.partition_activations is true, which this build "
            "cannot do: remove it, and say with ratio which share of the blocks backward computes "
            "again");
}

TEST(DeepSpeedKeys, that_lockstep_lacks_are_told_from_slips) {
  EXPECT_EQ(mistake_with({{"/aio", {{"block_size", 1048576}}}}),
            "gpt.json:1: aio is {...}: a key of DeepSpeed's that Lockstep does not have; remove "
            "it");
  EXPECT_EQ(mistake_with({{"/gradient_predivide_factor", 2}}),
            "gpt.json:1: gradient_predivide_factor is 2: a key of DeepSpeed's that Lockstep does "
            "not have; remove it");
  EXPECT_EQ(mistake_with({{"/checkpoint/tag_validation", "Warn"}}),
            "gpt.json:1: checkpoint.tag_validation is \"Warn\": a key of DeepSpeed's that Lockstep "
            "does not have; remove it");
  EXPECT_EQ(mistake_with({{"/optimizer/params/torch_adam", true}}),
            "gpt.json:1: optimizer.params.torch_adam is true: a key of DeepSpeed's that Lockstep "
            "does not have; remove it");
  EXPECT_EQ(mistake_with({{"/fp16/los_scale", 0}}),
            "gpt.json:1: fp16.los_scale is no key of fp16: did you mean 'loss_scale'?");
  EXPECT_THAT(mistake_with({{"/autotunin", 1}}), Not(HasSubstr("'autotuning'")))
      << "what would be refused is not proposed";
}

}  // namespace lockstep::train
