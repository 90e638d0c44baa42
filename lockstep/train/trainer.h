// The training loop: steps, accumulation, validation, metrics, checkpoints, and a clean end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/dataset.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/recovery/checkpointer.h>
#include <lockstep/recovery/peer_copies.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/options.h>
#include <lockstep/train/reporter.h>
#include <lockstep/train/stepper.h>
#include <lockstep/train/stop_request.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// Every rank makes one, with the same arguments, and calls run() once.
//
// A step's batch has the same samples for every number of ranks and of accumulated passes that give
// the batch the same size, and its gradient is divided by the number of samples or tokens in the
// whole batch. So the layout does not change the answer.
//
// Ownership: shares task, datasets and job. Threading: one thread. While it runs it handles SIGINT,
// SIGTERM and SIGHUP: at the first signal all ranks save after the same step and run() returns.
// Failure: UsageError before the first step if something cannot work; TrainingStopped; the errors
// of checkpoints and communication.
class Trainer {
 public:
  // `validation` may be null. A model that is not yet distributed over the ranks is wrapped.
  Trainer(DistributedManager dist, std::shared_ptr<Task> task,
          std::shared_ptr<const data::Dataset> training,
          std::shared_ptr<const data::Dataset> validation, TrainerOptions options);
  ~Trainer();

  TrainingResult run();

  std::int64_t total_steps() const { return total_steps_; }

 private:
  // A step whose result is known, and not yet reported.
  struct Settled {
    StepResult result;
    std::optional<StepTimes> times;
  };
  enum class Saving {
    on_the_way,  // a failure is logged, and training goes on
    at_the_end,  // waits until the checkpoint is written, and throws if that fails
  };

  Batch asked_batch() const;
  void keep_batch(const std::map<std::string, double>& values);
  void check_autocast() const;
  void check_batch_norms() const;
  bool finished() const;
  void count_steps();
  void leave_finished_epoch();
  bool due(std::int64_t interval) const { return interval > 0 && step_ % interval == 0; }
  void train_step();
  void run_passes(std::optional<StepTimes>& times);
  void run_pipeline(PipelinePasses& pipeline, std::int64_t num_passes);
  bool take_stand_in(data::Batch& batch, const data::Dataset& dataset);
  double peak_flops() const;
  void note_progress(const char* phase) const { note_progress(phase, step_ + 1); }
  void note_progress(const char* phase, std::int64_t step) const;
  void report_settled();
  void validate();
  bool agree_to_stop(bool wanted) const;

  bool runs_ahead() const { return stepper_->runs_ahead() && !options_.step_times; }
  void settle();
  void finish_step();
  template <typename Work>
  void or_give_up(const Work& work);

  // These are defined in trainer_checkpoints.cpp.
  void open_output();
  void check_still_ours() const;
  void resume();
  void note_start();
  void restore_newest(const std::optional<checkpoint::TrainingState>& start);
  void restore(const std::filesystem::path& checkpoint);
  // A checkpoint that was found damaged, and how.
  struct Damaged {
    checkpoint::Checkpoint checkpoint;
    std::string damage;
  };
  void set_aside(const std::vector<Damaged>& all) const;
  void warn_of_gone() const;
  void restore_copy(const checkpoint::Checkpoint& on_disk);
  void go_on_from(const checkpoint::TrainingState& state, const std::string& what);
  RankMessages rank_messages() const { return RankMessages(dist_.world()); }
  void take_copy();
  void leave_copies();
  CheckpointContents contents();
  void save(Saving saving);
  void poll_save();
  void finish_save();
  void heed(const SaveResult& saved);
  checkpoint::TrainingState state() const;

  DistributedManager dist_;
  std::shared_ptr<Task> task_;
  std::shared_ptr<torch::nn::Module> model_;
  TrainerOptions options_;
  Batch batch_;
  data::DataLoader loader_;
  std::shared_ptr<const data::Dataset> training_;
  std::shared_ptr<const data::Dataset> validation_;
  std::unique_ptr<Stepper> stepper_;
  std::int64_t total_steps_ = 0;
  std::unique_ptr<Reporter> reporter_;         // only on the main rank
  std::shared_ptr<const FolderLock> lock_;     // only on the main rank, in a run with a folder
  std::unique_ptr<Checkpointer> checkpoints_;  // only in a run with a folder

  std::int64_t step_ = 0;  // steps done so far
  std::optional<StepTimes> unsettled_times_;
  std::optional<Settled> unreported_;
  std::int64_t samples_ = 0;  // seen by all ranks
  std::int64_t saved_step_ = 0;
  std::optional<RankSpeeds> speeds_;  // only with several ranks
  TrainingResult result_;
};

}  // namespace lockstep::train
