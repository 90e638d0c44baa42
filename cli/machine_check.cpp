#include <cli/machine_check.h>

#include <filesystem>

#include <lockstep/base/error.h>
#include <lockstep/base/folder_lock.h>
#include <lockstep/device/host.h>
#include <lockstep/elastic/cores.h>
#include <lockstep/models/config.h>

namespace lockstep::cli {

namespace {

namespace fs = std::filesystem;

constexpr double kMiB = 1 << 20;
constexpr double kGiB = 1 << 30;

// Of the optimizer, for each parameter.
double state_bytes(const train::OptimizerSection& optimizer) {
  if (optimizer.type != train::OptimizerType::sgd) return 8;
  return optimizer.momentum > 0 ? 4 : 0;
}

void check_device(const train::TrainConfig& config) {
  if (config.device == train::DeviceChoice::cuda && elastic::num_visible_gpus() == 0)
    throw UsageError("device is \"cuda\", and this host has no GPU that is visible: take \"auto\", "
                     "or look at CUDA_VISIBLE_DEVICES and at what lockstep check says");
}

// Of the model's state on one rank, for each parameter: weight, gradient and the optimizer's, whole
// or in parts.
double bytes_a_parameter(const train::TrainConfig& config, int num_ranks) {
  const auto& sharding = config.sharding;
  const double parts = sharding.strategy == train::Sharding::hybrid && sharding.ranks_per_copy > 0
                           ? static_cast<double>(sharding.ranks_per_copy)
                           : num_ranks;
  const double state = state_bytes(config.optimizer);
  switch (sharding.strategy) {
    case train::Sharding::none: break;
    case train::Sharding::optimizer: return 8 + state / parts;
    case train::Sharding::gradients: return 4 + (4 + state) / parts;
    case train::Sharding::full:
    case train::Sharding::hybrid: return (8 + state) / parts;
  }
  return 8 + state;
}

// This much is needed whatever the batch.
void check_memory(const train::TrainConfig& config, const train::RunPlan& plan, int num_ranks) {
  if (config.device != train::DeviceChoice::cpu && elastic::num_visible_gpus() > 0) return;
  const std::int64_t num_parameters = models::num_parameters(plan.model);
  const double needed_a_rank =
      bytes_a_parameter(config, num_ranks) * static_cast<double>(num_parameters);
  const auto there = static_cast<double>(device::Host().memory().total_bytes);
  if (there == 0 || needed_a_rank * num_ranks <= there) return;  // 0: the kernel does not say
  const bool can_cut = num_ranks > 1 && config.sharding.strategy != train::Sharding::full;
  throw UsageError(
      "the model has {:.3g} parameters, which with gradients and the optimizer's state are {:.1f} "
      "GiB on each of {} rank{}, and this host lets them have {:.1f} GiB together: make "
      "model.hidden_size (it is {}) or model.num_layers (it is {}) smaller{}{}",
      static_cast<double>(num_parameters), needed_a_rank / kGiB, num_ranks,
      num_ranks == 1 ? "" : "s", there / kGiB, plan.model.hidden_size, plan.model.num_layers,
      can_cut ? ", set sharding_strategy to \"FULL_SHARD\"" : "",
      num_ranks == 1 ? "" : ", or start fewer ranks");
}

// Only what one checkpoint takes: those before it may make room.
void check_disk(const train::TrainConfig& config, const train::RunPlan& plan) {
  fs::path folder = fs::absolute(config.output);
  std::error_code unknown;
  while (!fs::exists(folder, unknown) && folder.has_relative_path()) folder = folder.parent_path();
  const fs::space_info space = fs::space(folder, unknown);
  if (unknown) return;
  const double needed =
      (4 + state_bytes(config.optimizer)) * static_cast<double>(models::num_parameters(plan.model));
  const auto there = static_cast<double>(space.available);
  if (needed <= there) return;
  throw UsageError("a checkpoint of this run takes {:.1f} MiB, and the disk of '{}' has {:.1f} MiB "
                   "left: make room, or choose another output",
                   needed / kMiB, folder.string(), there / kMiB);
}

// The main rank will hold the lock; a mistake is found here before any rank starts.
void check_no_other_run(const std::filesystem::path& output) {
  std::error_code unknown;
  if (std::filesystem::is_directory(output, unknown)) const FolderLock looked(output);
}

}  // namespace

void check_machine(const train::TrainConfig& config, const train::RunPlan& plan, int num_ranks) {
  check_device(config);
  check_memory(config, plan, num_ranks);
  check_no_other_run(config.output);
  check_disk(config, plan);
}

}  // namespace lockstep::cli
