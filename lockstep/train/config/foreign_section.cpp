#include <algorithm>

#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

// Sections with a switch. Their other keys are settings of what is off, so their values do not
// matter; a key that DeepSpeed does not have there is a slip all the same.
struct Switched {
  std::string_view key;
  std::string_view what;  // what this build would have to do
  std::vector<std::string_view> settings;
};

const std::vector<Switched>& switched_sections() {
  static const std::vector<Switched> all = {
      {"amp", "has no Apex (bf16 and fp16 are its ways to 16 bits)", {"opt_level"}},
      {"flops_profiler",
       "does not count floating-point operations yet",
       {"recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed",
        "output_file"}},
      {"comms_logger",
       "has no logger of collectives",
       {"verbose", "prof_all", "debug", "prof_ops"}},
      {"wandb", "does not write to Weights & Biases", {"group", "team", "project"}},
      {"comet",
       "does not write to Comet",
       {"samples_log_interval", "project", "workspace", "api_key", "experiment_name",
        "experiment_key", "online", "mode"}},
  };
  return all;
}

void read_switched(JsonSection& top, const Switched& one) {
  JsonSection section = top.section(one.key);
  bool enabled = false;
  if (section.boolean("enabled", enabled) && enabled)
    section.mistake("enabled", fmt::format("is true, but this build {}: set it to false, or leave "
                                           "the section out",
                                           one.what));
  section.allow(one.settings);
}

// Keys at the top of a DeepSpeed config that Lockstep has no use for.
constexpr std::string_view kForeign[] = {"memory_breakdown",
                                         "prescale_gradients",
                                         "gradient_predivide_factor",
                                         "seq_parallel_communication_data_type",
                                         "sparse_gradients",
                                         "disable_allgather",
                                         "dump_state",
                                         "zero_allow_untested_optimizer",
                                         "zero_force_ds_cpu_optimizer",
                                         "graph_harvesting",
                                         "use_data_before_expert_parallelism",
                                         "checkpoint_parallel_write_pipeline",
                                         "sparse_attention",
                                         "pipeline",
                                         "tensor_parallel",
                                         "aio",
                                         "autotuning",
                                         "compression_training",
                                         "curriculum_learning",
                                         "data_efficiency",
                                         "data_types",
                                         "eigenvalue",
                                         "hybrid_engine",
                                         "nebula",
                                         "progressive_layer_drop",
                                         "quantize_training",
                                         "compile",
                                         "timers",
                                         "weight_quantization",
                                         "torch_autocast"};

constexpr std::string_view kForeignCheckpoint[] = {"tag_validation",           "load_universal",
                                                   "use_node_local_storage",   "parallel_write",
                                                   "checkpoint_serialization", "writer"};
constexpr std::string_view kForeignOptimizer[] = {"legacy_fusion"};
constexpr std::string_view kForeignParams[] = {"torch_adam", "set_grad_none", "freeze_step",
                                               "cuda_aware", "comm_backend_name"};

// {"enabled": false, ...}
bool switched_off(const JsonNode& node) {
  const JsonNode* enabled = node.find("enabled");
  return enabled != nullptr && enabled->asks_for_nothing();
}

bool is_default_of(std::string_view key, const JsonNode& node) {
  if (key == "gradient_predivide_factor") {
    const auto* real = std::get_if<double>(&node.value);
    const auto* integer = std::get_if<std::int64_t>(&node.value);
    return (real != nullptr && *real == 1) || (integer != nullptr && *integer == 1);
  }
  return false;
}

void refuse(JsonSection& section, std::span<const std::string_view> keys) {
  for (const std::string_view key : keys) {
    const JsonNode* node = section.foreign(key);
    if (node == nullptr || node->asks_for_nothing() || switched_off(*node) ||
        is_default_of(key, *node))
      continue;
    section.mistake(key, fmt::format("is {}: a key of DeepSpeed's that Lockstep does not have; "
                                     "remove it",
                                     node->quoted()));
  }
}

}  // namespace

void read_foreign(JsonSection& top) {
  for (const Switched& one : switched_sections()) read_switched(top, one);
  refuse(top, kForeign);
  JsonSection checkpoint = top.section("checkpoint");
  refuse(checkpoint, kForeignCheckpoint);
  JsonSection optimizer = top.section("optimizer");
  refuse(optimizer, kForeignOptimizer);
  JsonSection params = optimizer.section("params");
  refuse(params, kForeignParams);
}

}  // namespace lockstep::train
