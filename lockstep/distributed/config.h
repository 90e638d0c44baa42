// How a program's training is spread over its ranks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/base/deadline.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/mesh/mesh_shape.h>
#include <lockstep/nn/tensor_axis.h>
#include <lockstep/parallel/replicate/options.h>
#include <lockstep/parallel/shard/options.h>
#include <lockstep/parallel/shard/strategy.h>

namespace lockstep {

using shard::CPUOffload;
using shard::MixedPrecision;
using shard::ZeroPlusPlusConfig;

enum class ParallelMode {
  DDP,   // every rank holds the whole model
  FSDP,  // ranks hold parts of it, as ShardingStrategy says
};

// Ranks that work together on the same samples, by axes of the mesh: those along which data is
// spread are the rest. What is cut is the model's own to say: layers (nn::ColumnParallelLinear and
// the like, models::LanguageModel::spread), stages (pipeline::Pipeline), attention
// (nn::ContextParallelAttention).
struct ModelParallelSizes {
  int tensor = 1;    // "tp": parts of each layer; ranks next to each other
  int pipeline = 1;  // "pp": stages; ranks furthest from each other
  int context = 1;   // "cp": parts of each sequence

  int ranks() const { return tensor * pipeline * context; }
};

struct DistributedConfig {
  ParallelMode mode = ParallelMode::DDP;
  // Of FSDP, and FULL_SHARD where it is not given.
  std::optional<ShardingStrategy> sharding_strategy = {};
  // The axes that data is spread over, slowest first; one size may be -1. Where not given, one axis
  // over all ranks that model_parallel leaves, or for HYBRID_SHARD a copy of the model on each
  // host.
  std::vector<mesh::Axis> mesh = {};
  // The further axes of the mesh.
  ModelParallelSizes model_parallel = {};
  // How a tensor axis lays activations between the layers that wrap_model() cuts.
  nn::BetweenLayers between_layers = nn::BetweenLayers::whole;
  // What ranks talk through: "auto", or one of comm::available_backends().
  std::string backend = "auto";
  // How long joining, and any call between ranks, may take before it fails by name.
  milliseconds timeout{600'000};
  // The best there is where not given.
  std::optional<c10::DeviceType> device_type = {};
  // More ranks than GPUs share them, with a warning; or that is an error.
  device::GpuUse gpu_use = device::GpuUse::shared;
  replicate::Options ddp = {};
  // Of FSDP; what is cut is the strategy's to say. Mixed precision, offload and ZeRO++ are of the
  // strategies that cut gradients.
  shard::Options fsdp = {};
};

// What a config cuts: nothing with DDP.
ShardingStrategy strategy_of(const DistributedConfig& config);

// Whether that strategy takes over a model's parameters unit by unit, so that they need not all be
// there before.
bool takes_units(const DistributedConfig& config);

// UsageError where a config asks for what its strategy does not have.
void check(const DistributedConfig& config);

}  // namespace lockstep
