// DeepSpeed's keys that Lockstep does not read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include <lockstep/train/config/sections.h>

#include "tests/train/configs.h"

namespace lockstep::train {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
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

TEST(DeepSpeedKeys, without_effect_are_accepted_with_any_value) {
  const std::pair<const char*, nlohmann::json> keys[] = {
      {"/aio", {{"block_size", 1048576}}},
      {"/autotuning", {{"enabled", true}, {"fast", false}}},
      {"/compile", {{"deepcompile", true}}},
      {"/checkpoint/tag_validation", "Fail"},
      {"/cuda_visible_devices", "0,1"},
      {"/gradient_predivide_factor", 2},
      {"/optimizer/params/torch_adam", true},
      {"/prescale_gradients", true},
      {"/wandb", {{"enabled", true}, {"project", "mine"}}},
      {"/zero_allow_untested_optimizer", true},
      {"/zero_optimization/max_live_parameters", 1e9},
      {"/zero_optimization/offload_optimizer/ratio", 0.5},
      {"/zero_optimization/overlap_comm", true},
      {"/zero_optimization/stage3_gather_fp16_weights_on_model_save", true},
      {"/zero_optimization/stage3_max_live_parameters", 1e9},
      {"/zero_optimization/use_multi_rank_bucket_allreduce", false}};
  for (const auto& [key, value] : keys) {
    EXPECT_EQ(to_json(config_with({{key, value}})), to_json(config_with({}))) << key;
    const ConfigDraft draft = draft_with({{key, value}});
    std::string path(key + 1);
    std::ranges::replace(path, '/', '.');
    EXPECT_THAT(draft.without_effect(), ElementsAre(path));
  }
  EXPECT_THAT(draft_with({{"/aio", nullptr}, {"/prescale_gradients", "auto"}}).without_effect(),
              IsEmpty());
}

TEST(DeepSpeedKeys, that_ask_for_what_this_build_cannot_do_are_mistakes) {
  EXPECT_EQ(mistake_with({{"/amp/enabled", true}}),
            "gpt.json:1: amp is {...}, which DeepSpeed does and Lockstep does not: use "
            "bf16.enabled or fp16.enabled");
  EXPECT_EQ(mistake_with({{"/activation_checkpointing/cpu_checkpointing", true}}),
            "gpt.json:1: activation_checkpointing.cpu_checkpointing is true, which DeepSpeed does "
            "and Lockstep does not: remove it, and say with activation_checkpointing.ratio which "
            "share of the blocks backward computes again");
  EXPECT_EQ(mistake_with({{"/gradient_allreduce_op", "sum"}}),
            "gpt.json:1: gradient_allreduce_op is \"sum\", which DeepSpeed does and Lockstep does "
            "not: remove it, and scale the learning rate instead");
  EXPECT_THAT(mistake_with({{"/sparse_attention/mode", "fixed"}}), HasSubstr("sparse_attention"));
  EXPECT_THAT(mistake_with({{"/optimizer/params/amsgrad", true}}), HasSubstr("AMSGrad"));
  // Switches count at any depth, such as those of compression.
  const auto compression = [](bool on) {
    return nlohmann::json{
        {"weight_quantization",
         {{"shared_parameters", {{"enabled", on}}}, {"different_groups", {{"a", {{"bits", 8}}}}}}},
        {"row_pruning", {{"shared_parameters", {{"enabled", false}}}}}};
  };
  EXPECT_THAT(mistake_with({{"/compression_training", compression(true)}}),
              HasSubstr("switch it off with \"enabled\": false"));
  EXPECT_EQ(to_json(config_with({{"/compression_training", compression(false)},
                                 {"/gradient_allreduce_op", "mean"},
                                 {"/zero_optimization/mics_shard_size", -1},
                                 {"/data_efficiency", {{"enabled", false}, {"seed", 1}}}})),
            to_json(config_with({})));
}

TEST(DeepSpeedKeys, are_told_from_slips) {
  EXPECT_EQ(mistake_with({{"/fp16/los_scale", 0}}),
            "gpt.json:1: fp16.los_scale is no key of fp16: did you mean 'loss_scale'?");
  EXPECT_THAT(mistake_with({{"/autotunin", 1}}), Not(HasSubstr("'autotuning'")))
      << "what would have no effect is not proposed";
}

TEST(DeepSpeedKeys, name_axes_and_optimizers) {
  const TrainConfig config = config_with({{"/tensor_parallel/autotp_size", 2},
                                          {"/sequence_parallel_size", 4},
                                          {"/data_parallel_size", 3},
                                          {"/optimizer/type", "FusedAdam"},
                                          {"/optimizer/params/bias_correction", false},
                                          {"/zero_optimization", true}});
  EXPECT_EQ(config.parallel.tensor, 2);
  EXPECT_EQ(config.parallel.context, 4);
  EXPECT_EQ(config.parallel.context_algorithm, mesh::ContextAlgorithm::all_to_all);
  EXPECT_EQ(config.parallel.data, 3);
  EXPECT_EQ(config.optimizer.type, "AdamW");
  EXPECT_FALSE(config.optimizer.options.as<optim::AdamWOptions>()->bias_correction);
  EXPECT_EQ(config.sharding.strategy, ShardingStrategy::SHARD_OPTIMIZER);
  EXPECT_EQ(to_json(parse_config(to_json(config), {})), to_json(config));
  EXPECT_EQ(to_json(config_with({{"/tensor_parallel", {{"autotp_size", 1}}},
                                 {"/sequence_parallel_size", 1},
                                 {"/zero_optimization", false}})),
            to_json(config_with({})));
  EXPECT_EQ(mistake_with({{"/tensor_parallel/autotp_size", 2}, {"/parallel/tensor", 4}}),
            "gpt.json:1: tensor_parallel.autotp_size is 2, but parallel.tensor is 4: set one of "
            "them");
}

// Every key has a row in docs/config.md, with the same words.
TEST(DeepSpeedKeys, are_all_documented) {
  std::ifstream file(LOCKSTEP_DOCS "/config.md");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  for (const DeepSpeedKey& key : deepspeed_keys())
    EXPECT_THAT(text, HasSubstr("| `" + std::string(key.path) + "` | " + std::string(key.words)));
}

}  // namespace lockstep::train
