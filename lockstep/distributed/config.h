// How a program's training is spread over its ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/base/deadline.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/distributed/axes/job_axes.h>
#include <lockstep/mesh/placement/mesh_shape.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/parallel/data_parallel/same_values.h>
#include <lockstep/parallel/replicate/options.h>
#include <lockstep/parallel/shard/options.h>
#include <lockstep/parallel/shard/sizes/strategy.h>
#include <lockstep/parallel/tensor/parallelize_module.h>

namespace lockstep {

using shard::CPUOffload;
using shard::MixedPrecision;
using shard::ZeroPlusPlusConfig;

// How ranks share the model. The last four spread it along axes of model_parallel, each of them
// alone over all ranks where its size is not given; with a sharding_strategy, along those of the
// data, too.
enum class ParallelMode {
  DDP,       // every rank holds the whole model
  FSDP,      // ranks hold parts of it, as ShardingStrategy says
  TENSOR,    // parts of each layer
  PIPELINE,  // stages
  CONTEXT,   // the whole model, and parts of each sequence
  HYBRID,    // whatever the sizes in model_parallel say
};

constexpr const char* name_of(ParallelMode mode) {
  switch (mode) {
    case ParallelMode::DDP: return "DDP";
    case ParallelMode::FSDP: return "FSDP";
    case ParallelMode::TENSOR: return "TENSOR";
    case ParallelMode::PIPELINE: return "PIPELINE";
    case ParallelMode::CONTEXT: return "CONTEXT";
    case ParallelMode::HYBRID: return "HYBRID";
  }
  return "a mode without a name";
}

struct DistributedConfig {
  ParallelMode mode = ParallelMode::DDP;
  // FULL_SHARD where it is not given with FSDP; nothing is cut along the data's axes where it is
  // not with the others.
  std::optional<ShardingStrategy> sharding_strategy = {};
  // The axes that data is spread over, slowest first; one size may be -1. Where not given, one axis
  // over all ranks that model_parallel leaves, or for HYBRID_SHARD a copy of the model on each
  // host.
  std::vector<mesh::Axis> mesh = {};
  // The further axes of the mesh.
  ModelParallelSizes model_parallel = {};
  // How a tensor axis lays activations between those layers of lockstep::nn that wrap_model() cuts.
  nn::BetweenLayers between_layers = nn::BetweenLayers::whole;
  // The plain torch::nn layers that wrap_model() cuts over the tensor axis, by their names, as
  // tensor::parallelize_module() does:
  //
  //   .tensor_plan = {{"blocks.*.fc1", Cut::column}, {"blocks.*.fc2", Cut::row}}
  tensor::Plan tensor_plan = {};
  // The backend of the ranks' calls: "auto", or one of comm::available_backends().
  std::string backend = "auto";
  // How long joining, and any call between ranks, may take before it fails by name.
  milliseconds timeout{600'000};
  // The best there is where not given.
  std::optional<c10::DeviceType> device_type = {};
  // More ranks than GPUs share them, with a warning; or that is an error.
  device::GpuUse gpu_use = device::GpuUse::shared;
  // On GPUs and under autocast, biases of linear layers and cross-entropy go through kernels of
  // ours, in the whole process from the first setup_distributed() on that says so
  // (nn/layers/autocast_operators.h). Nothing else of a program changes.
  bool autocast_operators = true;
  // When gradients of passes are exchanged that others of the step follow (accumulate()).
  ExchangeGradients exchange_gradients = ExchangeGradients::automatic;
  // Every so many exchanges of gradients, and at the first, ranks that hold the same parameters
  // compare them; where they differ, backward() throws on all of them. 0: never.
  std::int64_t consistency_check_interval = data_parallel::kConsistencyCheckInterval;
  replicate::Options ddp = {};
  // Options of FSDP; what is cut is the strategy's to say. Mixed precision, offload and ZeRO++ are
  // of the strategies that cut gradients.
  shard::Options fsdp = {};
};

}  // namespace lockstep
