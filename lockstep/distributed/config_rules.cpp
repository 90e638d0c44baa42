#include <lockstep/distributed/config_rules.h>

#include <lockstep/base/error.h>

namespace lockstep {

namespace {

// So that three of them multiply to a number that fits.
constexpr int kMostOnAnAxis = 1 << 10;

// The size of the axis that a mode is about; null where it is not about one.
int* own_size(ParallelMode mode, ModelParallelSizes& sizes) {
  switch (mode) {
    case ParallelMode::TENSOR: return &sizes.tensor;
    case ParallelMode::PIPELINE: return &sizes.pipeline;
    case ParallelMode::CONTEXT: return &sizes.context;
    case ParallelMode::DDP:
    case ParallelMode::FSDP:
    case ParallelMode::HYBRID: break;
  }
  return nullptr;
}

const char* name_of_strategy(const DistributedConfig& config) {
  return config.mode == ParallelMode::DDP ? "DDP" : name_of(strategy_of(config));
}

}  // namespace

ShardingStrategy strategy_of(const DistributedConfig& config) {
  if (config.mode == ParallelMode::DDP) return ShardingStrategy::NO_SHARD;
  return config.sharding_strategy.value_or(config.mode == ParallelMode::FSDP
                                               ? ShardingStrategy::FULL_SHARD
                                               : ShardingStrategy::NO_SHARD);
}

DistributedConfig sized_for(DistributedConfig config, int world_size) {
  if (int* size = own_size(config.mode, config.model_parallel); size != nullptr && *size == 1)
    *size = world_size;
  return config;
}

bool takes_units(const DistributedConfig& config) { return cuts_gradients(strategy_of(config)); }

JobAxes axes_for(const DistributedConfig& config, const JobRanks& ranks) {
  return axes_for({.strategy = strategy_of(config),
                   .data = config.mesh,
                   .model_parallel = config.model_parallel},
                  ranks);
}

std::vector<std::string> lines_of(const DistributedConfig& config) {
  const auto& [tensor, pipeline, context] = config.model_parallel;
  std::vector<std::string> lines{
      fmt::format("the mode is {}", name_of(config.mode)),
      fmt::format("sharding_strategy is {}", name_of_strategy(config)),
      fmt::format("model_parallel is tensor {} × pipeline {} × context {}", tensor, pipeline,
                  context),
      fmt::format("between_layers is {}",
                  config.between_layers == nn::BetweenLayers::whole ? "whole" : "by_positions"),
      fmt::format("exchange_gradients is {}", name_of(config.exchange_gradients)),
      fmt::format("consistency_check_interval is {}", config.consistency_check_interval)};
  for (std::size_t i = 0; i < config.tensor_plan.size(); ++i)
    lines.push_back(fmt::format("element {} of tensor_plan is '{}' by {}", i,
                                config.tensor_plan[i].layers,
                                tensor::name_of(config.tensor_plan[i].cut)));
  for (std::size_t i = 0; i < config.mesh.size(); ++i)
    lines.push_back(fmt::format("axis {} of mesh is {} of size {}", i, config.mesh[i].name,
                                config.mesh[i].size));
  return lines;
}

void check(const DistributedConfig& config) {
  if (config.mode == ParallelMode::DDP && config.sharding_strategy &&
      cuts_optimizer(*config.sharding_strategy))
    throw UsageError("a sharding_strategy is given, and the mode is DDP, in which every rank holds "
                     "the whole model: set .mode = ParallelMode::FSDP, too");
  ModelParallelSizes sizes = config.model_parallel;
  for (const auto& [name, size] :
       {std::pair("tensor", sizes.tensor), std::pair("pipeline", sizes.pipeline),
        std::pair("context", sizes.context)})
    if (size < 1 || size > kMostOnAnAxis)
      throw UsageError(
          "model_parallel.{} is {}: give the number of ranks, 1 for none and at most {}", name,
          size, kMostOnAnAxis);
  if (const int* own = own_size(config.mode, sizes); own != nullptr && *own != sizes.ranks())
    throw UsageError("the mode is {}, and model_parallel has tensor {} × pipeline {} × context {}: "
                     "set .mode = ParallelMode::HYBRID, which takes all of them",
                     name_of(config.mode), sizes.tensor, sizes.pipeline, sizes.context);
  if (!config.tensor_plan.empty() && config.between_layers != nn::BetweenLayers::whole)
    throw UsageError("tensor_plan cuts plain torch::nn layers, between which activations are whole "
                     "on every rank, and between_layers is by_positions: leave one of them out");
  if (config.consistency_check_interval < 0)
    throw UsageError("consistency_check_interval is {}: give the number of gradient exchanges "
                     "between two checks, or 0 for none",
                     config.consistency_check_interval);
  const MixedPrecision& precision = config.fsdp.mixed_precision;
  const CPUOffload& offload = config.fsdp.cpu_offload;
  const ZeroPlusPlusConfig& zero = config.fsdp.zero_plus_plus;
  if (takes_units(config)) {
    shard::check(precision);
    shard::check(offload);
    return;
  }
  const auto refuse = [&](const char* option, const char* instead) {
    throw UsageError(
        "fsdp.{} is set, but with {} every rank keeps whole Float parameters and gradients, which "
        "it does not apply to: take {} (with mode FSDP), or leave it out{}",
        option, name_of_strategy(config), strategies_that_cut(ShardedState::gradients), instead);
  };
  if (precision.param_dtype || precision.reduce_dtype || precision.buffer_dtype)
    refuse("mixed_precision", " and compute in 16 bits with lockstep::autocast around the forward");
  if (offload.offload_optimizer || offload.offload_params) refuse("cpu_offload", "");
  if (zero.quantize_weights || zero.quantize_gradients || zero.has_nodes())
    refuse("zero_plus_plus", "");
}

}  // namespace lockstep
