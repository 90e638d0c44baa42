// DeepSpeed's keys that are none of ours, each with its fate here. A new one is a row of
// kDeepSpeedKeys.
#include <algorithm>
#include <iterator>

#include <lockstep/train/config/sections.h>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::train {

namespace {

constexpr auto kNoEffect = DeepSpeedKey::Fate::no_effect;
constexpr auto kNotHere = DeepSpeedKey::Fate::not_here;
constexpr auto kRead = DeepSpeedKey::Fate::read;

constexpr std::string_view kHow = "how DeepSpeed goes about it; the result is the same";
constexpr std::string_view kShown = "what is logged; see docs/config.md for what is here";
constexpr std::string_view kRules = "the model itself says how its layers are cut";
constexpr std::string_view kDisk = "settings of offload to disks";
constexpr std::string_view kSwitchOff = "remove it, or switch it off with \"enabled\": false";
constexpr std::string_view kOneBit = "remove it, as it belongs to 1-bit optimizers";
constexpr std::string_view kRecompute =
    "remove it, and say with activation_checkpointing.ratio which share of the blocks backward "
    "computes again";

constexpr DeepSpeedKey kDeepSpeedKeys[] = {
    // These are other names of keys that we have.
    {"bfloat16", kRead, "`bf16`"},
    {"data_parallel_size", kRead, "`parallel.data`"},
    {"sequence_parallel_size", kRead, "`parallel.context`, with `\"all_to_all\"` as its algorithm"},
    {"tensor_parallel.autotp_size", kRead, "`parallel.tensor`"},
    {"zero_optimization.cpu_offload", kRead, "`zero_optimization.offload_optimizer.device`"},
    {"zero_optimization.cpu_offload_param", kRead, "`zero_optimization.offload_param.device`"},
    {"elasticity.version", kRead, "0.1 and 0.2 choose the same batch here"},
    {"elasticity.ignore_non_elastic_batch_info", kRead,
     "whether `train_batch_size` and its kin may stand beside it"},
    {"elasticity.model_parallel_size", kRead, "must be what `parallel` comes to"},
    {"optimizer.params.amsgrad", kRead, "must be false"},
    {"optimizer.params.max_grad_norm", kRead, "an error, as in DeepSpeed: use `gradient_clipping`"},
    {"bf16.check_grad_overflow", kRead, "must be true: see `on_non_finite_loss`"},
    {"bf16.immediate_grad_update", kNoEffect, kHow},
    {"fp16.auto_cast", kNoEffect, "the model's inputs are whole numbers"},
    {"elasticity.min_time", kNoEffect, "it is for whoever schedules jobs"},
    {"elasticity.num_gpus_per_node", kNoEffect, "any number of ranks on a host will do"},

    // The run
    {"dump_state", kNoEffect, kShown},
    {"log_level", kNoEffect, kShown},
    {"memory_breakdown", kNoEffect, kShown},
    {"timers", kNoEffect, kShown},
    {"flops_profiler", kNoEffect, kShown},
    {"comms_logger", kNoEffect, kShown},
    {"wandb", kNoEffect, kShown},
    {"comet", kNoEffect, kShown},
    {"vocabulary_size", kNoEffect, "model.vocab_size says it"},
    {"cuda_visible_devices", kNoEffect, "the variable CUDA_VISIBLE_DEVICES says it"},
    {"managed_gradient_accumulation", kNoEffect, "the trainer always divides the loss itself"},
    {"autotuning", kNoEffect, "nothing is searched; lockstep plan compares layouts"},
    {"compile", kNoEffect, "there is no compiler"},
    {"graph_harvesting", kNoEffect, kHow},
    {"hybrid_engine", kNoEffect, "training does not generate text"},
    {"aio", kNoEffect, kDisk},
    {"tensor_parallel.dtype", kNoEffect, "bf16 and fp16 say it"},
    {"tensor_parallel.tp_overlap_comm", kNoEffect, kHow},
    {"tensor_parallel.tensor_parallel", kNoEffect, kRules},
    {"tensor_parallel.tp", kNoEffect, kRules},
    {"tensor_parallel.injection_policy_tuple", kNoEffect, kRules},
    {"tensor_parallel.partition_config", kNoEffect, kRules},
    {"tensor_parallel.preset_model", kNoEffect, kRules},
    {"tensor_parallel.keep_module_on_host", kNoEffect, kHow},
    {"tensor_parallel.replace_with_kernel_inject", kNoEffect, kHow},
    {"tensor_parallel.kernel_inject", kNoEffect, kHow},
    {"pipeline", kNoEffect, "parallel.pipeline says it"},
    {"use_data_before_expert_parallelism", kNoEffect, "there are no experts"},

    // Gradients and what they travel in
    {"prescale_gradients", kNoEffect, "sums are divided once; only their rounding could differ"},
    {"gradient_predivide_factor", kNoEffect,
     "sums are divided once; only their rounding could differ"},
    {"sparse_gradients", kNoEffect, kHow},
    {"disable_allgather", kNoEffect, kHow},
    {"allgather_size", kNoEffect, kHow},
    {"fp32_allreduce", kNoEffect, "communication_data_type says it, and is fp32 by default"},
    {"seq_parallel_communication_data_type", kNoEffect, "communication_data_type says it"},
    {"gradient_allreduce_op", kNotHere, "remove it, and scale the learning rate instead", "mean"},
    {"data_types", kNoEffect, "gradients accumulate in fp32, and bf16 and fp16 say the rest"},
    {"torch_autocast", kNotHere, "use bf16.enabled or fp16.enabled"},
    {"amp", kNotHere, "use bf16.enabled or fp16.enabled"},

    // Optimizers
    {"zero_allow_untested_optimizer", kNoEffect, "every optimizer here works with every stage"},
    {"zero_force_ds_cpu_optimizer", kNoEffect, "there is one AdamW, for CPUs and GPUs"},
    {"optimizer.legacy_fusion", kNoEffect, kHow},
    {"optimizer.params.torch_adam", kNoEffect, "there is one AdamW, for CPUs and GPUs"},
    {"optimizer.params.set_grad_none", kNoEffect, kHow},
    {"optimizer.params.fp32_optimizer_states", kNoEffect, "bf16.bf16_optimizer_states says it"},
    {"optimizer.params.ns_method", kNoEffect,
     "both methods have one result, computed in fp32 here"},
    {"optimizer.params.freeze_step", kNotHere, kOneBit},
    {"optimizer.params.cuda_aware", kNotHere, kOneBit},
    {"optimizer.params.comm_backend_name", kNotHere, kOneBit},

    // ZeRO
    {"zero_optimization.contiguous_gradients", kNoEffect, kHow},
    {"zero_optimization.reduce_scatter", kNoEffect, kHow},
    {"zero_optimization.reduce_bucket_size", kNoEffect, kHow},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kNoEffect, kHow},
    {"zero_optimization.allgather_partitions", kNoEffect, kHow},
    {"zero_optimization.allgather_bucket_size", kNoEffect, kHow},
    {"zero_optimization.overlap_comm", kNoEffect, kHow},
    {"zero_optimization.load_from_fp32_weights", kNoEffect, kHow},
    {"zero_optimization.elastic_checkpoint", kNoEffect,
     "every checkpoint fits any number of ranks"},
    {"zero_optimization.sub_group_size", kNoEffect, kHow},
    {"zero_optimization.round_robin_gradients", kNoEffect, kHow},
    {"zero_optimization.ignore_unused_parameters", kNoEffect, "unused parameters are no error"},
    {"zero_optimization.legacy_stage1", kNoEffect, kHow},
    {"zero_optimization.memory_efficient_linear", kNoEffect, kHow},
    {"zero_optimization.pipeline_loading_checkpoint", kNoEffect, kHow},
    {"zero_optimization.override_module_apply", kNoEffect, kHow},
    {"zero_optimization.log_trace_cache_warnings", kNoEffect, kShown},
    {"zero_optimization.enable_sanity_checks", kNoEffect, kHow},
    {"zero_optimization.leaf_module", kNoEffect, "fsdp.max_live_units says how much is gathered"},
    {"zero_optimization.save_muon_momentum_buffer_in_memory", kNoEffect, kDisk},
    {"zero_optimization.mics_hierarchical_params_gather", kNoEffect, kHow},
    {"zero_optimization.prefetch_bucket_size", kNoEffect, kHow},
    {"zero_optimization.param_persistence_threshold", kNoEffect, kHow},
    {"zero_optimization.model_persistence_threshold", kNoEffect, kHow},
    {"zero_optimization.max_live_parameters", kNoEffect, "fsdp.max_live_units bounds it"},
    {"zero_optimization.max_reuse_distance", kNoEffect, kHow},
    {"zero_optimization.gather_16bit_weights_on_model_save", kNoEffect,
     "every checkpoint holds whole parameters"},
    {"zero_optimization.gather_fp16_weights_on_model_save", kNoEffect,
     "every checkpoint holds whole parameters"},
    {"zero_optimization.module_granularity_threshold", kNoEffect, kHow},
    {"zero_optimization.use_all_reduce_for_fetch_params", kNoEffect, kHow},
    {"zero_optimization.allgather_sequential", kNoEffect, kHow},
    {"zero_optimization.mics_shard_size", kNotHere,
     "use sharding_strategy \"HYBRID_SHARD\" with fsdp.ranks_per_copy", "-1"},
    {"zero_optimization.zero_quantized_nontrainable_weights", kNotHere, "remove it"},
    {"zero_optimization.zeropp_loco_param", kNotHere, "remove it"},
    {"zero_optimization.zenflow", kNotHere, "remove it"},
    {"zero_optimization.cpu_offload_use_pin_memory", kNoEffect, "memory is pinned where it helps"},
    {"zero_optimization.offload_optimizer.pin_memory", kNoEffect,
     "memory is pinned where it helps"},
    {"zero_optimization.offload_optimizer.ratio", kNoEffect, "all of it is offloaded"},
    {"zero_optimization.offload_optimizer.super_offload", kNoEffect, kHow},
    {"zero_optimization.offload_optimizer.cpuadam_cores_perc", kNoEffect,
     "threads_per_rank says it"},
    {"zero_optimization.offload_optimizer.nvme_path", kNoEffect, kDisk},
    {"zero_optimization.offload_optimizer.buffer_count", kNoEffect, kDisk},
    {"zero_optimization.offload_optimizer.buffer_size", kNoEffect, kDisk},
    {"zero_optimization.offload_optimizer.max_in_cpu", kNoEffect, kDisk},
    {"zero_optimization.offload_optimizer.pipeline_read", kNoEffect, kDisk},
    {"zero_optimization.offload_optimizer.pipeline_write", kNoEffect, kDisk},
    {"zero_optimization.offload_optimizer.fast_init", kNoEffect, kDisk},
    {"zero_optimization.offload_param.pin_memory", kNoEffect, "memory is pinned where it helps"},
    {"zero_optimization.offload_param.nvme_path", kNoEffect, kDisk},
    {"zero_optimization.offload_param.buffer_count", kNoEffect, kDisk},
    {"zero_optimization.offload_param.buffer_size", kNoEffect, kDisk},
    {"zero_optimization.offload_param.max_in_cpu", kNoEffect, kDisk},

    // Activations
    {"activation_checkpointing.contiguous_memory_optimization", kNoEffect, kHow},
    {"activation_checkpointing.number_checkpoints", kNoEffect, "ratio says it"},
    {"activation_checkpointing.synchronize_checkpoint_boundary", kNoEffect, kHow},
    {"activation_checkpointing.profile", kNoEffect, kShown},
    {"activation_checkpointing.partition_activations", kNoEffect,
     "parallel.sequence_parallel cuts them among the ranks of a tensor axis"},
    {"activation_checkpointing.cpu_checkpointing", kNotHere, kRecompute},

    // Checkpoints
    {"checkpoint.tag_validation", kNoEffect, "ranks always agree on a checkpoint's step"},
    {"checkpoint.load_universal", kNoEffect, "every checkpoint fits any layout"},
    {"checkpoint.parallel_write", kNoEffect, "ranks always share the writing"},
    {"checkpoint.checkpoint_serialization", kNoEffect, kHow},
    {"checkpoint.writer", kNoEffect, kHow},
    {"checkpoint_parallel_write_pipeline", kNoEffect, "ranks always share the writing"},
    {"datastates_ckpt", kNoEffect, "checkpoint.async says it"},
    {"checkpoint.use_node_local_storage", kNotHere, "remove it, as all ranks write to one folder"},
    {"nebula", kNotHere, "remove it, as checkpoints go to the run's folder"},

    // These train another model, or on other data.
    {"compression_training", kNotHere, kSwitchOff},
    {"weight_quantization", kNotHere, kSwitchOff},
    {"quantize_training", kNotHere, kSwitchOff},
    {"progressive_layer_drop", kNotHere, kSwitchOff},
    {"curriculum_learning", kNotHere, kSwitchOff},
    {"data_efficiency", kNotHere, kSwitchOff},
    {"sparse_attention", kNotHere, kSwitchOff},
    {"eigenvalue", kNoEffect, "DeepSpeed no longer reads it"},
};

// Every "enabled" in a section, at any depth.
void collect_switches(const JsonNode& node, std::vector<const JsonNode*>& switches) {
  if (node.object() == nullptr) return;
  for (const auto& [key, child] : *node.object()) {
    if (key == "enabled") switches.push_back(&child);
    collect_switches(child, switches);
  }
}

bool is_off(const JsonNode& node) {
  if (node.asks_for_nothing()) return true;
  if (node.object() == nullptr) return false;
  if (const JsonNode* enabled = node.find("enabled")) return enabled->asks_for_nothing();
  std::vector<const JsonNode*> switches;
  collect_switches(node, switches);
  if (switches.empty())
    return std::ranges::all_of(*node.object(),
                               [](const JsonMember& one) { return is_off(one.node); });
  return std::ranges::all_of(switches, &JsonNode::asks_for_nothing);
}

bool is_harmless(const JsonNode& node, const DeepSpeedKey& key) {
  if (is_off(node)) return true;
  const std::string value = node.text() != nullptr ? *node.text() : node.quoted();
  return !key.harmless.empty() && value == key.harmless;
}

void judge(JsonSection& section, std::string_view name, const DeepSpeedKey& key) {
  if (key.fate == kRead) return;
  const JsonNode* node = section.foreign(name);
  if (node == nullptr || node->is_default()) return;
  if (key.fate == kNoEffect)
    section.has_no_effect(name);
  else if (!is_harmless(*node, key))
    section.mistake(name, fmt::format("is {}, which DeepSpeed does and Lockstep does not: {}",
                                      node->quoted(), key.words));
}

}  // namespace

std::span<const DeepSpeedKey> deepspeed_keys() { return kDeepSpeedKeys; }

void warn_of_keys_without_effect(const ConfigDraft& draft) {
  const auto& keys = draft.without_effect();
  if (!keys.empty())
    log::warn("{} {} no effect here (docs/config.md says why)", fmt::join(keys, ", "),
              keys.size() == 1 ? "has" : "have");
}

void read_deepspeed_keys(JsonSection& top) {
  for (const DeepSpeedKey& key : kDeepSpeedKeys) {
    JsonSection section = top;
    std::string_view name = key.path;
    for (auto dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
      section = section.section(name.substr(0, dot));
      name.remove_prefix(dot + 1);
    }
    judge(section, name, key);
    // DeepSpeed takes keys of stage 3 by both names.
    if (section.path() == "zero_optimization" && key.fate == kNoEffect)
      judge(section, "stage3_" + std::string(name), key);
  }
}

}  // namespace lockstep::train
