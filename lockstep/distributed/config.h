// How a program's training is spread over its ranks.
#pragma once

#include <optional>
#include <string>

#include <c10/core/Device.h>

#include <lockstep/base/deadline.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/parallel/replicate/options.h>

namespace lockstep {

enum class ParallelMode {
  DDP,  // every rank holds the whole model
};

struct DistributedConfig {
  ParallelMode mode = ParallelMode::DDP;
  // What ranks talk through: "auto", or one of comm::available_backends().
  std::string backend = "auto";
  // How long joining, and any call between ranks, may take before it fails by name.
  milliseconds timeout{600'000};
  // The best there is where not given.
  std::optional<c10::DeviceType> device_type = {};
  // More ranks than GPUs share them, with a warning; or that is an error.
  device::GpuUse gpu_use = device::GpuUse::shared;
  replicate::Options ddp = {};
};

}  // namespace lockstep
