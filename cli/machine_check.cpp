#include <cli/machine_check.h>

#include <filesystem>

#include <lockstep/base/error.h>
#include <lockstep/base/folder_lock.h>
#include <lockstep/device/host/host.h>
#include <lockstep/launch/processes/rank_setup.h>
#include <lockstep/models/spec/config.h>
#include <lockstep/train/preflight/memory_fit.h>

namespace lockstep::cli {

namespace {

namespace fs = std::filesystem;

constexpr double kMiB = 1 << 20;

void check_device(const train::TrainConfig& config) {
  if (config.device == train::DeviceChoice::cuda && launch::num_visible_gpus() == 0)
    throw UsageError("device is \"cuda\", and this host has no GPU that is visible: take \"auto\", "
                     "or look at CUDA_VISIBLE_DEVICES and at what lockstep check says");
}

// On a GPU its ranks look for themselves, and they are who says that it is tight.
void check_memory(const train::TrainConfig& config, const train::ResolvedRun& run, int num_ranks) {
  if (config.device != train::DeviceChoice::cpu && launch::num_visible_gpus() > 0) return;
  // What model parallelism takes has no formula here yet.
  if (config.parallel.ranks_together() > 1) return;
  train::RunMemory memory(config, run.model, plan::Device::cpu);
  const auto there = static_cast<std::int64_t>(device::Host().memory().total_bytes);
  train::judge_memory(memory, memory.configured(num_ranks, num_ranks, run.begun),
                      {.bytes = there, .num_ranks_sharing = num_ranks, .what = "this host"});
}

// Only what one checkpoint takes: those before it may make room.
void check_disk(const train::TrainConfig& config, const train::ResolvedRun& run) {
  fs::path folder = fs::absolute(config.output);
  std::error_code unknown;
  while (!fs::exists(folder, unknown) && folder.has_relative_path()) folder = folder.parent_path();
  const fs::space_info space = fs::space(folder, unknown);
  if (unknown) return;
  const double needed = static_cast<double>((4 + config.optimizer.options.state_bytes()) *
                                            models::num_parameters(run.model));
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

void check_machine(const train::TrainConfig& config, const train::ResolvedRun& run, int num_ranks) {
  check_device(config);
  check_memory(config, run, num_ranks);
  check_no_other_run(config.output);
  check_disk(config, run);
}

}  // namespace lockstep::cli
