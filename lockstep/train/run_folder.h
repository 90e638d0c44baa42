// The folder in which a run keeps its files.
#pragma once

#include <filesystem>
#include <memory>

#include <lockstep/base/folder_lock.h>
#include <lockstep/train/options.h>

namespace lockstep::train {

// The job's generation that this process belongs to.
FolderHolder this_generation();

class RunFolder {
 public:
  explicit RunFolder(const TrainerOptions& options) : options_(options) {}

  // Makes the folder if it is missing, and keeps other runs out as long as the lock lives. A lock
  // of an earlier generation of this job is taken over. UsageError if another run uses the folder,
  // FileError if nothing can be written.
  std::shared_ptr<const FolderLock> claim() const;

  // The run's config, resolved: to read, and to train with again.
  std::filesystem::path config() const { return options_.output / "config.json"; }
  std::filesystem::path checkpoints() const { return options_.output / "checkpoints"; }
  // Whether anything says where metrics are.
  bool has_metrics() const { return !options_.output.empty() || !options_.csv_folder.empty(); }
  bool has_tensorboard() const {
    return !options_.output.empty() || !options_.tensorboard_folder.empty();
  }
  std::filesystem::path best() const { return options_.output / "best"; }
  std::filesystem::path metrics() const {
    return (options_.csv_folder.empty() ? options_.output : options_.csv_folder) / "metrics.csv";
  }
  std::filesystem::path tensorboard() const {
    return options_.tensorboard_folder.empty() ? options_.output / "tensorboard"
                                               : options_.tensorboard_folder;
  }
  std::filesystem::path curve() const { return options_.output / "loss.svg"; }

 private:
  const TrainerOptions& options_;
};

}  // namespace lockstep::train
