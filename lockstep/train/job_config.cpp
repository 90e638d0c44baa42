#include <lockstep/train/job_config.h>

#include <algorithm>
#include <array>
#include <chrono>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/train/preflight/run_layout.h>

namespace lockstep::train {

namespace {

tensor::Cut cut_of(LayerCut cut) {
  switch (cut) {
    case LayerCut::column: return tensor::Cut::column;
    case LayerCut::row: return tensor::Cut::row;
    case LayerCut::heads: return tensor::Cut::heads;
    case LayerCut::qkv: return tensor::Cut::qkv;
  }
  LOCKSTEP_CHECK(false, "a cut without a name");
}

// Keys that may differ between hosts: where files are, and how a rank loads and prints.
bool is_for_a_host(const std::string& key) {
  static constexpr std::array kBeginnings = {
      "data.train",       "data.validation.",       "data.num_workers",  "data.prefetch",
      "model.from",       "parallel.schedule_file", "checkpoint.resume", "output",
      "tensorboard.",     "csv_monitor.",           "steps_per_print",   "device",
      "threads_per_rank", "timeout_seconds",
  };
  return key.ends_with("nvme_path") ||
         std::ranges::any_of(kBeginnings, [&](const char* one) { return key.starts_with(one); });
}

// The type that a config computes in; nothing for fp32, the type of the weights.
std::optional<c10::ScalarType> scalar_type_of(Precision precision) {
  switch (precision) {
    case Precision::fp32: return std::nullopt;
    case Precision::bf16: return c10::kBFloat16;
    case Precision::fp16: return c10::kHalf;
  }
  return std::nullopt;
}

}  // namespace

DistributedConfig distributed_config(const TrainConfig& config) {
  DistributedConfig result;
  result.mode = ParallelMode::FSDP;
  const JobSizes sizes = job_sizes(config);
  result.sharding_strategy = sizes.strategy;
  result.mesh = sizes.data;
  result.model_parallel = sizes.model_parallel;
  result.fsdp.max_live_units = static_cast<std::size_t>(config.sharding.max_live_units);
  if (cuts_gradients(config.sharding.strategy)) {
    result.fsdp.mixed_precision = {.param_dtype = scalar_type_of(config.precision.compute),
                                   .reduce_dtype = scalar_type_of(config.precision.gradients)};
    if (config.precision.narrow_masters) {
      shard::MixedPrecision& mixed = result.fsdp.mixed_precision;
      mixed.master_dtype = mixed.param_dtype;
      mixed.master_rounding = {.rounding = config.precision.stochastic_rounding
                                               ? optim::Rounding::stochastic
                                               : optim::Rounding::nearest,
                               .in_state = config.precision.narrow_states,
                               .seed = static_cast<std::uint64_t>(config.seed)};
    }
    result.fsdp.cpu_offload = {
        .offload_optimizer = config.sharding.offload_optimizer == OffloadDevice::cpu,
        .offload_params = config.sharding.offload_param == OffloadDevice::cpu};
    const ZeroPlusPlusSection& zero = config.sharding.zero_plus_plus;
    result.fsdp.zero_plus_plus = {
        .quantize_weights = zero.quantized_weights,
        .quantize_gradients = zero.quantized_gradients,
        .hierarchical_partition = static_cast<int>(zero.hpz_partition_size)};
  }
  result.between_layers = config.parallel.sequence_parallel ? nn::BetweenLayers::by_positions
                                                            : nn::BetweenLayers::whole;
  for (const auto& [layers, cut] : config.tensor_plan)
    result.tensor_plan.push_back({layers, cut_of(cut)});
  if (config.device == DeviceChoice::cpu) result.device_type = c10::DeviceType::CPU;
  if (config.device == DeviceChoice::cuda) result.device_type = c10::DeviceType::CUDA;
  constexpr double kMiB = 1 << 20;
  result.ddp.buckets = {.first_bytes = static_cast<std::size_t>(config.ddp.first_bucket_mb * kMiB),
                        .bytes = static_cast<std::size_t>(config.ddp.bucket_mb * kMiB)};
  result.backend = config.backend;
  result.timeout = std::chrono::seconds(config.timeout_seconds);
  result.exchange_gradients = config.exchange_gradients;
  result.consistency_check_interval = config.consistency_check_interval;
  result.ddp.find_unused_parameters = config.ddp.find_unused_parameters;
  return result;
}

std::optional<c10::ScalarType> autocast_of(const TrainConfig& config, c10::Device device) {
  if (device.is_cpu() || cuts_gradients(config.sharding.strategy)) return std::nullopt;
  return scalar_type_of(config.precision.compute);
}

std::optional<optim::LossScaleOptions> loss_scale_of(const TrainConfig& config,
                                                     c10::Device device) {
  const bool cuts = cuts_gradients(config.sharding.strategy);
  if (!cuts && device.is_cpu()) return std::nullopt;
  const bool half = config.precision.compute == Precision::fp16 ||
                    (cuts && config.precision.gradients == Precision::fp16);
  return half ? std::optional(config.precision.loss_scale) : std::nullopt;
}

void add_config_lines(const std::string& json, const std::string& prefix,
                      std::vector<std::string>& lines) {
  const auto values = nlohmann::ordered_json::parse(json).flatten();
  for (const auto& [path, value] : values.items()) {
    std::string key = prefix + path.substr(1);
    std::ranges::replace(key, '/', '.');
    if (!is_for_a_host(key)) lines.push_back(fmt::format("{} is {}", key, value.dump()));
  }
}

void check_same_config(const TrainConfig& config, const RankMessages& ranks) {
  std::vector<std::string> lines;
  add_config_lines(to_json(config), "", lines);
  check_told_the_same(lines, ranks);
}

}  // namespace lockstep::train
