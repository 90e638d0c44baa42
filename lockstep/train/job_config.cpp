#include <lockstep/train/job_config.h>

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <sstream>

#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/train/main_rank.h>
#include <lockstep/train/preflight/run_layout.h>
#include <lockstep/train/preflight/run_start.h>
#include <lockstep/train/reporter.h>

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

// Empty if the kernel does not say, because the host has more than CPU_SETSIZE cores.
std::vector<std::size_t> allowed_cores() {
  cpu_set_t set;
  std::vector<std::size_t> cores;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

// For each core that this rank may use, the number of the host's ranks that may use it.
std::vector<double> num_users(const DistributedManager& dist, const LaunchEnvironment& launch) {
  const std::vector<std::size_t> cores = allowed_cores();
  const auto node = static_cast<std::size_t>(launch.node_rank);
  // One table for all hosts: every rank adds its cores to the row of its host.
  std::vector<double> table(static_cast<std::size_t>(launch.num_nodes) * CPU_SETSIZE);
  for (const std::size_t core : cores) table.at(node * CPU_SETSIZE + core) = 1;
  if (dist.world_size() > 1) table = dist.sum(std::move(table));
  std::vector<double> users;
  for (const std::size_t core : cores) users.push_back(table[node * CPU_SETSIZE + core]);
  return users;
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

TrainerOptions trainer_options(const TrainConfig& config, c10::Device device) {
  TrainerOptions options;
  options.max_steps = config.max_steps;
  options.epochs = config.epochs;
  options.drop_last = config.dataloader_drop_last;
  options.num_workers = static_cast<int>(config.data.num_workers);
  options.prefetch = static_cast<int>(config.data.prefetch);
  options.optimizer = config.optimizer.options;
  options.learning_rate = config.optimizer.lr;
  options.weight_decay = config.optimizer.weight_decay;
  options.schedule = config.scheduler;
  options.gradient_clipping = config.gradient_clipping;
  options.on_non_finite = config.on_non_finite_loss;
  options.autocast = autocast_of(config, device);
  options.loss_scale = loss_scale_of(config, device);
  // In a run of many epochs, an interval that is never reached means "only at the end".
  options.validation_interval = config.validation.interval > 0
                                    ? config.validation.interval
                                    : std::numeric_limits<std::int64_t>::max();
  options.validation_batches = config.validation.batches;
  options.seed = static_cast<std::uint64_t>(config.seed);
  options.output = config.output;
  options.checkpoint_interval = config.checkpoint.interval;
  options.keep_checkpoints = static_cast<int>(config.checkpoint.keep);
  options.asynchronous_checkpoints = config.checkpoint.asynchronous;
  options.memory_interval = config.checkpoint.memory_interval;
  options.resume = config.checkpoint.resume;
  options.resume_from = config.checkpoint.resume_from;
  options.step_times = config.wall_clock_breakdown;
  options.csv = config.csv_monitor.enabled;
  options.tensorboard = config.tensorboard.enabled;
  options.csv_folder = config.csv_monitor.folder();
  options.tensorboard_folder = config.tensorboard.folder();
  options.steps_per_print = config.steps_per_print;
  options.config = to_json(config);
  return options;
}

std::shared_ptr<torch::nn::Module> spread_model(
    DistributedManager& dist, const TrainConfig& config,
    const std::function<std::shared_ptr<torch::nn::Module>()>& make, BatchNorms batch_norms) {
  torch::manual_seed(static_cast<std::uint64_t>(config.seed));
  if (batch_norms == BatchNorms::of_a_rank) return dist.build_model(make);
  const std::shared_ptr<torch::nn::Module> model = make();
  dist.convert_sync_batchnorm(model);
  return dist.wrap_model(model);
}

std::optional<BegunBatch> begun_batch_of_job(const TrainConfig& config,
                                             const DistributedManager& dist) {
  std::istringstream found(on_main_rank(dist, [&]() -> std::string {
    const auto begun = begun_batch(config, this_generation());
    return begun ? fmt::format("{} {} {}", begun->global, begun->micro, begun->num_ranks) : "";
  }));
  BegunBatch begun;
  if (found >> begun.global >> begun.micro >> begun.num_ranks) return begun;
  return std::nullopt;
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

int share_of_cores(const std::vector<double>& num_users, int num_usable, int num_local_ranks) {
  constexpr double kRounding = 1e-6;  // three thirds are one
  const double limit = static_cast<double>(num_usable) / num_local_ranks;
  double share = 0;
  for (const double users : num_users) share += 1 / std::max(users, 1.0);
  if (num_users.empty()) share = limit;
  if (static_cast<std::size_t>(num_usable) < num_users.size()) share = std::min(share, limit);
  return std::max(1, static_cast<int>(std::floor(share + kRounding)));
}

int num_threads(std::int64_t threads_per_rank, const DistributedManager& dist) {
  const LaunchEnvironment launch = read_launch_environment();
  // This comes before anything that may differ between ranks, because all ranks meet in it.
  const std::vector<double> users = num_users(dist, launch);
  if (threads_per_rank > 0) return static_cast<int>(threads_per_rank);
  if (const auto wanted = environment_integer("OMP_NUM_THREADS", 1, 1 << 16))
    return static_cast<int>(*wanted);
  return share_of_cores(users, dist.device_manager().num_cores(), launch.local_world_size);
}

}  // namespace lockstep::train
