// What an engine leaves in the folder of its run: the config, metrics of each step, and checkpoints
// that nobody asked for.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include <lockstep/base/folder_lock.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/reporter.h>
#include <lockstep/train/run_folder.h>
#include <lockstep/train/stepper.h>

namespace lockstep::train {

// Every rank makes one; the main rank's writes. Without `output` in the config it writes what
// output_path of a monitor names, and else nothing.
//
// Ownership: owns its files, and keeps other runs out of the folder while it lives. Threading: one
// thread. Failure: UsageError on all ranks if another run has the folder; later as Reporter.
class RunReport {
 public:
  RunReport(const DistributedManager& dist, const TrainConfig& config, bool scales_loss);
  ~RunReport();
  RunReport(const RunReport&) = delete;
  RunReport& operator=(const RunReport&) = delete;

  // Whether the run has a folder.
  bool has_folder() const { return !options_.output.empty(); }
  std::filesystem::path checkpoints() const { return RunFolder(options_).checkpoints(); }
  const std::shared_ptr<const FolderLock>& lock() const { return lock_; }

  // The time from here to the next step() counts for the rate.
  void begin_step();
  // A step's result, once it is known. `count`: of what the rate counts.
  void step(const StepResult& step, double count, std::int64_t num_skipped,
            const std::optional<StepTimes>& times);
  // The run goes on from this step: what the files have of later ones is removed.
  void go_on_from(std::int64_t step);
  // Puts on disk what there is, and draws the loss.
  void flush();

 private:
  bool writes() const;

  DistributedManager dist_;
  TrainerOptions options_;
  bool scales_loss_;
  std::shared_ptr<const FolderLock> lock_;  // only on the main rank
  std::int64_t begun_after_ = 0;
  std::unique_ptr<Reporter> reporter_;  // only on the main rank, from the first step on
};

}  // namespace lockstep::train
