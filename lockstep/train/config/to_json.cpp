#include <nlohmann/json.hpp>

#include <lockstep/train/config/names.h>

namespace lockstep::train {

namespace {

using json = nlohmann::ordered_json;

template <typename Value>
json or_auto(const std::optional<Value>& value) {
  return value ? json(*value) : json("auto");
}

json or_auto(std::int64_t value) { return value == 0 ? json("auto") : json(value); }

json paths(const std::vector<std::filesystem::path>& all) {
  json list = json::array();
  for (const auto& path : all) list.push_back(path.string());
  return list;
}

json model_json(const ModelSection& model) {
  if (!model.from.empty()) return {{"from", model.from.string()}};
  json section = {{"family", name_of(model.family, kFamilies)},
                  {"vocab_size", or_auto(model.vocab_size)},
                  {"hidden_size", model.hidden_size},
                  {"num_layers", model.num_layers},
                  {"num_heads", model.num_heads},
                  {"num_kv_heads", model.num_kv_heads},
                  {"intermediate_size", model.intermediate_size},
                  {"max_positions", model.max_positions},
                  {"dropout", model.dropout},
                  {"tie_embeddings", model.tie_embeddings},
                  {"norm_eps", model.norm_eps}};
  if (model.family == ModelFamily::llama) section["rope_theta"] = model.rope_theta;
  return section;
}

json data_json(const DataSection& data) {
  json section = {{"train", paths(data.train)}};
  if (!data.validation.empty()) section["validation"] = paths(data.validation);
  section["validation_fraction"] = data.validation_fraction;
  section["format"] = name_of(data.format, kFormats);
  section["sequence_length"] = data.sequence_length;
  section["num_workers"] = data.num_workers;
  section["prefetch"] = data.prefetch;
  return section;
}

json optimizer_json(const OptimizerSection& optimizer) {
  json params = {{"lr", optimizer.lr}, {"weight_decay", optimizer.weight_decay}};
  if (optimizer.type == OptimizerType::sgd) {
    params["momentum"] = optimizer.momentum;
    params["dampening"] = optimizer.dampening;
    params["nesterov"] = optimizer.nesterov;
  } else {
    params["betas"] = optimizer.betas;
    params["eps"] = optimizer.eps;
    params["adam_w_mode"] = optimizer.adam_w_mode;
    params["bias_correction"] = optimizer.bias_correction;
  }
  return {{"type", name_of(optimizer.type, kOptimizers)}, {"params", params}};
}

struct SchedulerJson {
  json operator()(const optim::Constant&) const { return section("Constant", json::object()); }
  json operator()(const optim::WarmupLR& options) const {
    return section("WarmupLR", {{"warmup_min_lr", options.warmup_min_lr},
                                {"warmup_max_lr", or_auto(options.warmup_max_lr)},
                                {"warmup_num_steps", options.warmup_num_steps},
                                {"warmup_type", name_of(options.warmup_type, kWarmups)}});
  }
  json operator()(const optim::WarmupDecayLR& options) const {
    return section("WarmupDecayLR", {{"total_num_steps", or_auto(options.total_num_steps)},
                                     {"warmup_min_lr", options.warmup_min_lr},
                                     {"warmup_max_lr", or_auto(options.warmup_max_lr)},
                                     {"warmup_num_steps", options.warmup_num_steps},
                                     {"warmup_type", name_of(options.warmup_type, kWarmups)}});
  }
  json operator()(const optim::WarmupCosineLR& options) const {
    return section("WarmupCosineLR", {{"total_num_steps", or_auto(options.total_num_steps)},
                                      {"warmup_min_ratio", options.warmup_min_ratio},
                                      {"warmup_num_steps", options.warmup_num_steps},
                                      {"cos_min_ratio", options.cos_min_ratio},
                                      {"warmup_type", name_of(options.warmup_type, kWarmups)}});
  }
  json operator()(const optim::OneCycle& options) const {
    return section("OneCycle", {{"cycle_min_lr", options.cycle_min_lr},
                                {"cycle_max_lr", options.cycle_max_lr},
                                {"decay_lr_rate", options.decay_lr_rate},
                                {"cycle_first_step_size", options.cycle_first_step_size},
                                {"cycle_second_step_size", or_auto(options.cycle_second_step_size)},
                                {"decay_step_size", options.decay_step_size}});
  }
  json operator()(const optim::LRRangeTest& options) const {
    return section("LRRangeTest", {{"lr_range_test_min_lr", options.lr_range_test_min_lr},
                                   {"lr_range_test_step_size", options.lr_range_test_step_size},
                                   {"lr_range_test_step_rate", options.lr_range_test_step_rate},
                                   {"lr_range_test_staircase", options.lr_range_test_staircase}});
  }

 private:
  static json section(const char* type, json params) {
    return {{"type", type}, {"params", std::move(params)}};
  }
};

json monitor_json(const MonitorSection& monitor) {
  return {{"enabled", monitor.enabled},
          {"output_path", monitor.output_path.string()},
          {"job_name", monitor.job_name}};
}

json checkpoint_json(const CheckpointSection& checkpoint) {
  json section = {{"interval", checkpoint.interval},
                  {"keep", checkpoint.keep},
                  {"async", checkpoint.asynchronous},
                  {"memory_interval", checkpoint.memory_interval}};
  switch (checkpoint.resume) {
    case Resume::automatic: section["resume"] = "auto"; break;
    case Resume::never: section["resume"] = "never"; break;
    case Resume::from: section["resume"] = checkpoint.resume_from.string(); break;
  }
  return section;
}

json sharding_json(const ShardingSection& sharding) {
  json section = {{"max_live_units", sharding.max_live_units}};
  if (sharding.ranks_per_copy > 0) section["ranks_per_copy"] = sharding.ranks_per_copy;
  return section;
}

json parallel_json(const ParallelSection& parallel) {
  json section = {{"data", parallel.data},
                  {"tensor", parallel.tensor},
                  {"pipeline", parallel.pipeline},
                  {"context", parallel.context},
                  {"sequence_parallel", parallel.sequence_parallel},
                  {"context_algorithm", name_of(parallel.context_algorithm, kContextExchanges)}};
  // Those without a pipeline have none.
  if (parallel.pipeline > 1) {
    if (parallel.schedule_file.empty())
      section["schedule"] = name_of(parallel.schedule, kPipelineSchedules);
    else
      section["schedule_file"] = parallel.schedule_file.string();
    if (parallel.chunks > 0) section["chunks"] = parallel.chunks;
    if (parallel.stage_layers.empty())
      section["balance"] = name_of(parallel.balance, kStageBalances);
    else
      section["stage_layers"] = parallel.stage_layers;
    section["timeline_step"] = parallel.timeline_step;
  }
  return section;
}

json elasticity_json(const std::optional<ElasticitySection>& elasticity) {
  if (!elasticity) return {{"enabled", false}};
  return {{"enabled", true},
          {"max_train_batch_size", elasticity->max_global},
          {"micro_batch_sizes", elasticity->micro_batches},
          {"min_gpus", elasticity->min_ranks},
          {"max_gpus", elasticity->max_ranks},
          {"prefer_larger_batch", elasticity->prefer_larger}};
}

json zero_json(const ShardingSection& sharding) {
  const ZeroPlusPlusSection& zero = sharding.zero_plus_plus;
  return {{"offload_optimizer", {{"device", name_of(sharding.offload_optimizer, kOffloadDevices)}}},
          {"offload_param", {{"device", name_of(sharding.offload_param, kOffloadDevices)}}},
          {"zero_quantized_weights", zero.quantized_weights},
          {"zero_quantized_gradients", zero.quantized_gradients},
          {"zero_hpz_partition_size", zero.hpz_partition_size}};
}

json fp16_json(const PrecisionSection& precision) {
  const optim::LossScaleOptions& scale = precision.loss_scale;
  return {{"enabled", precision.compute == Precision::fp16},
          {"loss_scale", scale.loss_scale},
          {"initial_scale_power", scale.initial_scale_power},
          {"loss_scale_window", scale.loss_scale_window},
          {"hysteresis", scale.hysteresis},
          {"consecutive_hysteresis", scale.consecutive_hysteresis},
          {"min_loss_scale", scale.min_loss_scale}};
}

}  // namespace

std::string to_json(const TrainConfig& config) {
  const json root = {
      {"model", model_json(config.model)},
      {"data", data_json(config.data)},
      {"train_batch_size", or_auto(config.batch.global)},
      {"train_micro_batch_size_per_gpu", or_auto(config.batch.micro)},
      {"gradient_accumulation_steps", or_auto(config.batch.accumulation)},
      {"elasticity", elasticity_json(config.elasticity)},
      {"optimizer", optimizer_json(config.optimizer)},
      {"scheduler", std::visit(SchedulerJson{}, config.scheduler)},
      {"gradient_clipping", config.gradient_clipping},
      {"max_steps", or_auto(config.max_steps)},
      {"epochs", or_auto(config.epochs)},
      {"seed", config.seed},
      {"output", config.output.string()},
      {"validation",
       {{"interval", config.validation.interval}, {"batches", config.validation.batches}}},
      {"checkpoint", checkpoint_json(config.checkpoint)},
      {"tensorboard", monitor_json(config.tensorboard)},
      {"csv_monitor", monitor_json(config.csv_monitor)},
      {"steps_per_print", config.steps_per_print},
      {"wall_clock_breakdown", config.wall_clock_breakdown},
      {"dataloader_drop_last", config.dataloader_drop_last},
      {"on_non_finite_loss", name_of(config.on_non_finite_loss, kOnNonFiniteLoss)},
      {"ddp",
       {{"first_bucket_mb", config.ddp.first_bucket_mb},
        {"bucket_mb", config.ddp.bucket_mb},
        {"find_unused_parameters", config.ddp.find_unused_parameters}}},
      {"sharding_strategy", name_of(config.sharding.strategy, kShardings)},
      {"parallel", parallel_json(config.parallel)},
      {"fsdp", sharding_json(config.sharding)},
      {"zero_optimization", zero_json(config.sharding)},
      {"bf16", {{"enabled", config.precision.compute == Precision::bf16}}},
      {"fp16", fp16_json(config.precision)},
      {"communication_data_type", name_of(config.precision.gradients, kPrecisions)},
      {"activation_checkpointing", {{"ratio", config.recomputed_blocks}}},
      {"device", name_of(config.device, kDevices)},
      {"communication", {{"backend", name_of(config.backend, kBackends)}}},
      {"timeout_seconds", config.timeout_seconds},
      {"consistency_check_interval", config.consistency_check_interval},
      {"threads_per_rank", or_auto(config.threads_per_rank)}};
  // A folder's name may be no UTF-8; that must not cost us the rest.
  return root.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep::train
