// Checks of keys against each other, each of which is right by itself (describe.cpp). A check
// leaves out keys that depend on a wrong value.
#include <algorithm>
#include <tuple>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/optim/registry/registry.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

namespace lockstep::train {

namespace {

void check_data(JsonSection& top, const DataSection& data) {
  JsonSection section = top.section("data");
  if (section.find("validation_fraction") != nullptr && data.validation_fraction > 0 &&
      !data.validation.empty())
    section.mistake("validation_fraction",
                    fmt::format("is {}, but data.validation names files of their own: remove one "
                                "of them",
                                data.validation_fraction));
}

void check_heads(JsonSection& section, const ModelSection& model) {
  if (model.hidden_size == 0 || model.num_heads == 0) return;
  if (model.hidden_size % model.num_heads != 0) {
    const std::int64_t below = model.hidden_size / model.num_heads * model.num_heads;
    const std::string near = below == 0 ? "" : fmt::format("{} or ", below);
    section.mistake("hidden_size",
                    fmt::format("is {}, which {} heads do not divide: make it "
                                "{}{}, or change model.num_heads",
                                model.hidden_size, model.num_heads, near, below + model.num_heads));
  } else if (const std::int64_t width = model.hidden_size / model.num_heads;
             section.sound({"family"}) && models::family_named(model.family).rotary &&
             width % 2 != 0) {
    section.mistake("num_heads", fmt::format("is {}, which leaves each head {} of the {} "
                                             "dimensions: rotary positions need an even number",
                                             model.num_heads, width, model.hidden_size));
  }
  if (model.num_heads % model.num_kv_heads != 0)
    section.mistake("num_kv_heads",
                    fmt::format("is {}, which does not divide the {} heads of model.num_heads",
                                model.num_kv_heads, model.num_heads));
}

void check_family(JsonSection& section, const ModelSection& model) {
  if (!section.sound({"family"})) return;
  const models::Family& family = models::family_named(model.family);
  if (!family.grouped_queries && section.find("num_kv_heads") != nullptr &&
      model.num_kv_heads != model.num_heads && section.sound({"num_heads", "num_kv_heads"}))
    section.mistake(
        "num_kv_heads",
        fmt::format("is {}, but the family \"{}\" has as many as heads, {}: remove it, or make "
                    "model.family {}",
                    model.num_kv_heads, family.name, model.num_heads,
                    models::families_that([](const auto& one) { return one.grouped_queries; })));
  if (!family.rotary && section.find("rope_theta") != nullptr)
    section.mistake("rope_theta",
                    fmt::format("is of rotary positions, which the family \"{}\" does not have: "
                                "remove it, or make model.family {}",
                                family.name,
                                models::families_that([](const auto& one) { return one.rotary; })));
}

void check_model(JsonSection& top, const TrainConfig& config) {
  JsonSection section = top.section("model");
  const ModelSection& model = config.model;
  if (!model.from.empty()) {
    for (const std::string& key : section.keys_beside("from"))
      section.mistake(key, "cannot stand beside model.from, whose folder says what the model is: "
                           "remove one of them");
    return;
  }
  if (section.find("max_positions") != nullptr && section.sound({"max_positions"}) &&
      model.max_positions < config.data.sequence_length)
    section.mistake("max_positions", fmt::format("is {}, less than data.sequence_length, which is "
                                                 "{}: make it at least that",
                                                 model.max_positions, config.data.sequence_length));
  check_heads(section, model);
  check_family(section, model);
}

void check_batch(JsonReader& reader, JsonSection& top, const BatchSection& batch) {
  for (const std::string_view key : {"train_batch_size", "train_micro_batch_size_per_gpu",
                                     "gradient_accumulation_steps", "elasticity"})
    if (top.has_mistake(key)) return;
  if (!batch.global && !batch.micro)
    top.missing(
        "train_batch_size",
        "set it to the samples of a step on all ranks, or train_micro_batch_size_per_gpu to "
        "those of one forward pass on one rank, or both");
  else if (const std::string wrong = batch_contradiction(batch); !wrong.empty())
    reader.mistake_about("train_batch_size", wrong);
}

constexpr std::string_view kAxes[] = {"parallel.tensor", "parallel.pipeline", "parallel.context"};
constexpr std::size_t kMostMicroBatchSizes = 64;

void check_elasticity(JsonSection& top, TrainConfig& config) {
  JsonSection section = top.section("elasticity");
  const ParallelSection& parallel = config.parallel;
  bool ignores_others = false;
  std::int64_t together = parallel.ranks_together();
  double version = 0.2;
  if (config.elasticity) {
    section.boolean("ignore_non_elastic_batch_info", ignores_others);
    section.integer("model_parallel_size", together, 1, 1 << 20);
    section.number("version", version, {.lowest = 0.1, .highest = 0.2});
  }
  constexpr std::string_view kUnread[] = {"version", "ignore_non_elastic_batch_info",
                                          "model_parallel_size"};
  section.allow(kUnread);
  if (!config.elasticity) return;
  ElasticitySection& elasticity = *config.elasticity;
  auto& micro_batches = elasticity.micro_batches;
  std::ranges::sort(micro_batches);
  micro_batches.erase(std::unique(micro_batches.begin(), micro_batches.end()), micro_batches.end());
  const bool has_both = section.sound({"max_train_batch_size", "micro_batch_sizes"});
  if (micro_batches.size() > kMostMicroBatchSizes)
    section.mistake("micro_batch_sizes", fmt::format("has {} sizes: give at most {}",
                                                     micro_batches.size(), kMostMicroBatchSizes));
  else if (has_both && micro_batches.back() > elasticity.max_global)
    section.mistake("micro_batch_sizes",
                    fmt::format("has {}, and max_train_batch_size is {}: leave it out, or "
                                "make that larger",
                                micro_batches.back(), elasticity.max_global));
  if (elasticity.min_ranks > elasticity.max_ranks && section.sound({"min_gpus", "max_gpus"}))
    section.mistake("min_gpus", fmt::format("is {}, and max_gpus {}: make it the smaller one",
                                            elasticity.min_ranks, elasticity.max_ranks));
  if (together != parallel.ranks_together() && section.sound({"model_parallel_size"}) &&
      top.sound(kAxes))
    section.mistake("model_parallel_size",
                    fmt::format("is {}, and parallel has {} ranks for each share of the "
                                "data: leave it out",
                                together, parallel.ranks_together()));
  const BatchSection& batch = config.batch;
  if (!ignores_others && (batch.global || batch.micro || batch.accumulation))
    section.mistake("enabled", "is true, which chooses the samples of a step, and the config has "
                               "train_batch_size, train_micro_batch_size_per_gpu or "
                               "gradient_accumulation_steps besides: leave those out, or set "
                               "ignore_non_elastic_batch_info");
  if (section.sound({"max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus",
                     "model_parallel_size"}) &&
      top.sound(kAxes) && choose_batch(elasticity, together).even_data_ranks.empty())
    section.mistake("max_train_batch_size",
                    fmt::format("is {}, and no number of ranks from {} to {} divides a "
                                "batch up to that evenly: make it larger",
                                elasticity.max_global, elasticity.min_ranks, elasticity.max_ranks));
  if (section.has_mistake())
    config.elasticity.reset();
  else
    config.batch = {};
}

void check_optimizer(JsonSection& top, const TrainConfig& config) {
  const OptimizerSection& optimizer = config.optimizer;
  JsonSection section = top.section("optimizer");
  JsonSection params = section.section("params");
  if (!section.sound({"type"})) return params.allow_anything();
  if (params.find("max_grad_norm") != nullptr)
    params.mistake("max_grad_norm", "does not belong there: use gradient_clipping, at the top of "
                                    "the config");
  for (const optim::OptionMistake& mistake : optimizer.options.mistakes(optimizer.type))
    if (params.sound({mistake.key}) && params.sound(mistake.judged_with))
      params.mistake(mistake.key, mistake.what);
  if (optimizer.options.kind() != optim::StepKind::elementwise && config.parallel.tensor > 1 &&
      top.sound({"parallel.tensor"}))
    section.mistake("type", fmt::format("is \"{}\", which looks at whole parameters, and "
                                        "parallel.tensor is {}, which cuts them: use an optimizer "
                                        "that goes by elements, such as \"AdamW\", or set "
                                        "parallel.tensor to 1",
                                        optimizer.type, config.parallel.tensor));
  bool amsgrad = false;
  if (params.boolean("amsgrad", amsgrad) && amsgrad)
    params.mistake("amsgrad", "is true: there is no AMSGrad here; remove it");
}

// DeepSpeed's default is longer than many runs: a user who has not set it needs to hear its key.
std::string default_warmup_too_long(JsonSection& params, const TrainConfig& config) {
  if (params.find("warmup_num_steps") != nullptr || !params.sound({"total_num_steps"})) return "";
  const auto steps = config.scheduler.warmup_and_total();
  if (!steps || steps->first <= steps->second) return "";
  return fmt::format("is left out, and its default, {}, is more than all {} steps "
                     "(total_num_steps, or else max_steps): set it, for example to {}",
                     steps->first, steps->second, std::max<std::int64_t>(1, steps->second / 10));
}

void check_scheduler(JsonSection& top, const TrainConfig& config) {
  JsonSection section = top.section("scheduler");
  if (!section.present()) return;
  JsonSection params = section.section("params");
  if (section.find("type") == nullptr || !section.sound({"type"})) {
    section.missing("type", "one of DeepSpeed's schedules, for example \"WarmupCosineLR\"");
    return params.allow_anything();
  }
  if (const std::string wrong = default_warmup_too_long(params, config); !wrong.empty())
    section.mistake("params.warmup_num_steps", wrong);
  std::string misfits;
  for (const optim::OptionMistake& mistake : config.scheduler.mistakes(config.optimizer.lr)) {
    if (!params.sound({mistake.key}) || !params.sound(mistake.judged_with)) continue;
    if (mistake.judged_with.empty())
      params.mistake(mistake.key, mistake.what);
    else
      misfits += fmt::format("{}{} {}", misfits.empty() ? "" : "; and ", mistake.key, mistake.what);
  }
  if (!misfits.empty())
    section.mistake("params", fmt::format("do not fit together: {}: {}",
                                          optim::name_of(config.scheduler), misfits));
}

// "interleaved" in quotes, and every other schedule that may have any number of stages a rank.
std::string schedules_of_any_chunks() {
  std::vector<std::string> names;
  for (const pipeline::ScheduleKind kind : pipeline::schedule_kinds())
    if (pipeline::definition_of(kind).has_free_chunks)
      names.push_back(fmt::format("\"{}\"", pipeline::name_of(kind)));
  return fmt::format("{}", fmt::join(names, " or "));
}

void check_pipeline(JsonSection& section, const ParallelSection& parallel) {
  const auto is_set = [&](std::string_view key) {
    return section.find(key) != nullptr && section.sound({key});
  };
  if (!section.sound({"pipeline"})) return;
  if (parallel.pipeline == 1) {
    for (const std::string_view key :
         {"schedule", "chunks", "schedule_file", "balance", "stage_layers", "timeline_step"})
      if (is_set(key) && (key != "timeline_step" || parallel.timeline_step > 0))
        section.mistake(key, "is set, and there is no pipeline: set pipeline, or remove it");
    return;
  }
  const bool scheduled = is_set("schedule"), chunked = is_set("chunks");
  if (is_set("schedule_file") && (scheduled || chunked))
    section.mistake("schedule_file", fmt::format("is set, and so is {}: the file says it all, so "
                                                 "remove one of them",
                                                 scheduled ? "schedule" : "chunks"));
  if (is_set("balance") && is_set("stage_layers"))
    section.mistake("stage_layers", "is set, and so is balance: layers are given, or balanced");
  if (!section.sound({"schedule", "chunks"})) return;
  const pipeline::ScheduleDefinition& schedule = pipeline::definition_of(parallel.schedule);
  if (chunked && !schedule.has_free_chunks && parallel.chunks != schedule.num_chunks)
    section.mistake("chunks",
                    fmt::format("is {}, and the schedule \"{}\" has {} stage{} a rank: "
                                "take {}, or remove it",
                                parallel.chunks, schedule.name, schedule.num_chunks,
                                schedule.num_chunks == 1 ? "" : "s", schedules_of_any_chunks()));
}

// Reads DeepSpeed's name of an axis of `parallel`, where 0 and 1 mean no such axis. Returns whether
// it asks for one.
bool read_old_axis(JsonSection& there, std::string_view key, JsonSection& parallel,
                   std::string_view axis, std::int64_t& size) {
  std::int64_t asked = 0;
  if (!there.integer(key, asked, 0, 1 << 20) || asked <= 1) return false;
  if (parallel.find(axis) != nullptr && asked != size && parallel.sound({axis}))
    there.mistake(key,
                  fmt::format("is {}, but parallel.{} is {}: set one of them", asked, axis, size));
  size = asked;
  return true;
}

void check_parallel(JsonSection& top, ParallelSection& parallel) {
  JsonSection section = top.section("parallel");
  if (parallel.data == 0)
    section.mistake("data", "is 0: give the ranks that have samples of their own, or -1 for all "
                            "that the other axes leave");
  JsonSection tensor_parallel = top.section("tensor_parallel");
  read_old_axis(tensor_parallel, "autotp_size", section, "tensor", parallel.tensor);
  read_old_axis(top, "data_parallel_size", section, "data", parallel.data);
  // DeepSpeed's Ulysses.
  if (read_old_axis(top, "sequence_parallel_size", section, "context", parallel.context))
    parallel.context_algorithm = mesh::ContextAlgorithm::all_to_all;
  if (parallel.sequence_parallel && parallel.tensor == 1 && section.sound({"tensor"}))
    section.mistake("sequence_parallel",
                    "is true, and there is no tensor axis whose ranks could share the sequence "
                    "between layers: set tensor, or remove it");
  check_pipeline(section, parallel);
}

constexpr std::string_view kStrategyKeys[] = {"sharding_strategy", "parallel.sharding_strategy",
                                              "zero_optimization.stage"};

// DeepSpeed once had a switch for each of these sections.
void read_old_name(JsonSection& zero, std::string_view key, std::string_view section,
                   OffloadDevice& device) {
  bool offloads = false;
  if (!zero.boolean(key, offloads) || !offloads) return;
  JsonSection now = zero.section(section);
  if (now.find("device") != nullptr && device == OffloadDevice::none && !now.has_mistake("device"))
    zero.mistake(key,
                 fmt::format("is true, but {} is \"none\": set one of them", now.path("device")));
  device = OffloadDevice::cpu;
}

void check_offload(JsonSection& zero, ShardingSection& sharding) {
  JsonSection optimizer = zero.section("offload_optimizer");
  read_old_name(zero, "cpu_offload", "offload_optimizer", sharding.offload_optimizer);
  read_old_name(zero, "cpu_offload_param", "offload_param", sharding.offload_param);

  if (sharding.offload_optimizer == OffloadDevice::cpu && !cuts_gradients(sharding.strategy))
    optimizer.mistake(
        "device",
        fmt::format("is \"cpu\", but with the sharding_strategy \"{}\" gradients are "
                    "whole on every rank's device: take {}, or set it to \"none\"",
                    name_of(sharding.strategy), config_words_that_cut(ShardedState::gradients)));
  if (sharding.offload_param != OffloadDevice::cpu) return;
  if (!cuts_parameters(sharding.strategy)) {
    // Parameters are whole on every rank's device, in DeepSpeed as well.
    zero.has_no_effect("offload_param");
    sharding.offload_param = OffloadDevice::none;
  } else if (!optimizer.has_mistake("device")) {
    // An optimizer elsewhere would bring the parameters back for every step.
    if (sharding.offload_optimizer == OffloadDevice::none && optimizer.find("device") != nullptr)
      optimizer.has_no_effect("device");
    sharding.offload_optimizer = OffloadDevice::cpu;
  }
}

void check_zero_plus_plus(JsonSection& zero, const ShardingSection& sharding) {
  const ZeroPlusPlusSection& section = sharding.zero_plus_plus;
  const auto refuse = [&](const char* key, const std::string& value, const char* what,
                          ShardedState to_cut) {
    zero.mistake(
        key, fmt::format("is {}, but with the sharding_strategy \"{}\" {} are whole on "
                         "every rank: take {}, or remove it",
                         value, name_of(sharding.strategy), what, config_words_that_cut(to_cut)));
  };
  if (!cuts_parameters(sharding.strategy)) {
    if (section.quantized_weights)
      refuse("zero_quantized_weights", "true", "parameters", ShardedState::parameters);
    if (section.hpz_partition_size > 1)
      refuse("zero_hpz_partition_size", std::to_string(section.hpz_partition_size), "parameters",
             ShardedState::parameters);
  }
  if (section.quantized_gradients && !cuts_gradients(sharding.strategy))
    refuse("zero_quantized_gradients", "true", "gradients", ShardedState::gradients);
}

// A key that is set, to something that it may be.
bool is_set(JsonSection& section, std::string_view key) {
  return section.find(key) != nullptr && section.sound({key});
}

void check_sharding(JsonSection& top, ShardingSection& sharding) {
  bool named = is_set(top, "sharding_strategy");
  JsonSection parallel = top.section("parallel");
  ShardingStrategy in_parallel = sharding.strategy;
  if (is_set(parallel, "sharding_strategy")) {
    parallel.choice("sharding_strategy", in_parallel, kShardings);
    if (named && in_parallel != sharding.strategy)
      parallel.mistake(
          "sharding_strategy",
          fmt::format("is \"{}\", but outside of parallel it is \"{}\": set one of them",
                      name_of(in_parallel), name_of(sharding.strategy)));
    sharding.strategy = in_parallel;
    named = true;
  }
  JsonSection fsdp = top.section("fsdp");
  if (is_set(fsdp, "ranks_per_copy") && !has_copies(sharding.strategy) && top.sound(kStrategyKeys))
    fsdp.mistake("ranks_per_copy",
                 fmt::format("is {}, but only the sharding_strategy \"HYBRID_SHARD\" has several "
                             "copies of the model: set that, or remove it",
                             sharding.ranks_per_copy));

  JsonSection zero = top.section("zero_optimization");
  if (is_set(zero, "stage")) {
    std::int64_t stage = 0;
    zero.integer("stage", stage, 0, kLastStage);
    if (named && stage != traits_of(sharding.strategy).stage)
      zero.mistake("stage", fmt::format("is {}, but sharding_strategy is \"{}\": set one of them",
                                        stage, name_of(sharding.strategy)));
    else if (!named)
      sharding.strategy = strategy_of_stage(stage);
  }
  constexpr std::string_view kOldNames[] = {"cpu_offload", "cpu_offload_param"};
  zero.allow(kOldNames);
  // Nothing that depends on an unknown strategy is judged.
  if (!top.sound(kStrategyKeys)) return;
  check_offload(zero, sharding);
  check_zero_plus_plus(zero, sharding);
}

// Weights, gradients and optimizer state that have 16 bits themselves.
void check_narrow(JsonSection& top, const TrainConfig& config) {
  const PrecisionSection& precision = config.precision;
  for (const auto& [name, key, compute] :
       {std::tuple("bf16", "bf16_master_weights_and_grads", Precision::bf16),
        std::tuple("fp16", "fp16_master_weights_and_grads", Precision::fp16)}) {
    JsonSection section = top.section(name);
    bool asked = false;
    if (!is_set(section, key) || !section.boolean(key, asked) || !asked) continue;
    const ShardingStrategy strategy = config.sharding.strategy;
    if (precision.compute != compute)
      section.mistake(key, fmt::format("is true, and {}.enabled is not: set that, too", name));
    else if (!cuts_gradients(strategy) && top.sound(kStrategyKeys))
      section.mistake(
          key, fmt::format("is true, but with the sharding_strategy \"{}\" weights are the "
                           "model's own, in fp32: take {}, or remove it",
                           name_of(strategy), config_words_that_cut(ShardedState::gradients)));
    else if (config.optimizer.options.kind() != optim::StepKind::elementwise)
      section.mistake(key, fmt::format("is true, and {} looks at whole parameters, which it does "
                                       "in fp32: take an optimizer that goes by elements, such as "
                                       "AdamW, or remove it",
                                       optim::name_of(config.optimizer.options)));
  }
  JsonSection bf16 = top.section("bf16");
  if (precision.narrow_states &&
      !(precision.narrow_masters && precision.compute == Precision::bf16))
    bf16.mistake("bf16_optimizer_states", "is true, and bf16_master_weights_and_grads is not: the "
                                          "state of weights in fp32 is fp32; set both, or neither");
}

// Whether the section's own switch is on.
bool check_bf16(JsonSection& top, std::string_view name) {
  JsonSection section = top.section(name);
  bool enabled = false;
  if (is_set(section, "enabled") || name != "bf16") section.boolean("enabled", enabled);
  bool checked = true;
  if (section.boolean("check_grad_overflow", checked) && !checked)
    section.mistake("check_grad_overflow",
                    "is false, but gradients are always looked at: on_non_finite_loss says what "
                    "becomes of a step where one is infinite or not a number; remove it");
  if (name != "bf16")
    for (const std::string_view key : {"bf16_master_weights_and_grads", "bf16_optimizer_states"})
      if (const JsonNode* node = section.foreign(key); node != nullptr && !node->asks_for_nothing())
        section.mistake(key, "is of the section \"bf16\", which `bfloat16` is another name of: "
                             "write all of it there");
  return enabled;
}

void check_fp16(JsonSection& top, const PrecisionSection& precision, bool enabled) {
  JsonSection section = top.section("fp16");
  // Numbers that are in range by themselves may not go together.
  if (!enabled || !section.sound({"loss_scale", "initial_scale_power", "min_loss_scale"})) return;
  try {
    const optim::LossScale whole(precision.loss_scale);
  } catch (const UsageError& error) {
    section.mistake("min_loss_scale", fmt::format("does not fit the others: {}", error.what()));
  }
}

void check_precision(JsonSection& top, ShardingStrategy strategy, PrecisionSection& precision) {
  JsonSection half = top.section("fp16");
  bool fp16 = false;
  if (is_set(half, "enabled")) half.boolean("enabled", fp16);
  check_fp16(top, precision, fp16);
  const bool bf16 = check_bf16(top, "bf16");
  const bool bfloat16 = check_bf16(top, "bfloat16");
  if (fp16 && (bf16 || bfloat16))
    top.mistake(bf16 ? "bf16.enabled" : "bfloat16.enabled",
                "is true, and so is fp16.enabled: a run has one of them");
  if (bfloat16) precision.compute = Precision::bf16;
  if (is_set(top, "communication_data_type") && precision.gradients != Precision::fp32 &&
      !cuts_gradients(strategy) && top.sound(kStrategyKeys))
    top.mistake("communication_data_type",
                fmt::format("is \"{}\", but with the sharding_strategy \"{}\" gradients travel in "
                            "fp32: take {}, or remove it",
                            name_of(precision.gradients, kPrecisions), name_of(strategy),
                            config_words_that_cut(ShardedState::gradients)));
}

// The stages of a program's own model, of which nothing is known before it is made.
void check_stages_of_program(JsonSection& section, const ParallelSection& parallel) {
  const bool is_measured =
      parallel.balance == StageBalance::time || parallel.balance == StageBalance::compute;
  if (is_measured && section.sound({"balance"}))
    section.mistake("balance",
                    fmt::format("is \"{}\", and what a program's own blocks cost is not known "
                                "before they have data: take \"layers\" or \"parameters\", or "
                                "give each stage's number of blocks in stage_layers",
                                name_of(parallel.balance, kStageBalances)));
  if (section.find("timeline_step") != nullptr) section.has_no_effect("timeline_step");
}

// The model, the data and the loop are the program's, and the config has nothing of them.
void check_for_program(JsonSection& top, const TrainConfig& config) {
  if (top.find("model") != nullptr)
    top.mistake("model", "describes a model, and the program gives its own to "
                         "lockstep::initialize(): remove it");
  JsonSection data = top.section("data");
  for (const std::string_view key :
       {"train", "validation", "validation_fraction", "format", "sequence_length"})
    if (data.find(key) != nullptr)
      data.mistake(key, "is of data in files of tokens, and the program gives its own data set to "
                        "Engine::loader(): remove it");
  const ParallelSection& parallel = config.parallel;
  JsonSection axes = top.section("parallel");
  if (!config.tensor_plan.empty() && parallel.tensor == 1 && axes.sound({"tensor"}))
    top.mistake("tensor_plan", "is set, and parallel.tensor is 1, which cuts no layer: set "
                               "parallel.tensor, or remove it");
  if (!config.tensor_plan.empty() && parallel.sequence_parallel &&
      axes.sound({"sequence_parallel"}))
    axes.mistake("sequence_parallel", "is true, and tensor_plan cuts plain layers, between which "
                                      "activations are whole: remove one of them");
  if (parallel.pipeline > 1) check_stages_of_program(axes, parallel);
  if (parallel.context > 1 && axes.sound({"context"}))
    axes.mistake("context", fmt::format("is {}, and only attention of lockstep::nn can share a "
                                        "sequence among ranks: remove it, or give such attention a "
                                        "context axis yourself (docs/context.md)",
                                        parallel.context));
  JsonSection recomputed = top.section("activation_checkpointing");
  if (config.recomputed_blocks > 0)
    recomputed.mistake("ratio", "is of the built-in models: in the function that makes your model, "
                                "call wrap_activation_checkpointing(model, …) in its place");
  for (const std::string_view key : {"epochs", "output", "validation", "checkpoint", "tensorboard",
                                     "csv_monitor", "wall_clock_breakdown"})
    if (top.find(key) != nullptr) top.has_no_effect(key);
}

void check_length(JsonSection& top, const TrainConfig& config) {
  if (!config.max_steps && !config.epochs && !top.has_mistake("epochs"))
    top.missing("max_steps", "say how long to train with max_steps, epochs, or both (then "
                             "whichever ends first)");
}

}  // namespace

void check_together(JsonReader& reader, JsonSection& top, TrainConfig& config) {
  if (config.model_of == ModelOf::program) {
    check_for_program(top, config);
  } else {
    if (!config.tensor_plan.empty())
      top.mistake("tensor_plan", "is for a model that a program gives to lockstep::initialize(): "
                                 "built-in models know which of their layers are cut; remove it");
    check_length(top, config);
    check_data(top, config.data);
    check_model(top, config);
  }
  check_optimizer(top, config);
  check_scheduler(top, config);
  check_parallel(top, config.parallel);
  check_elasticity(top, config);
  check_sharding(top, config.sharding);
  check_precision(top, config.sharding.strategy, config.precision);
  check_narrow(top, config);
  if (!config.elasticity) check_batch(reader, top, config.batch);
}

}  // namespace lockstep::train
