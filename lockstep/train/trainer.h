// The training loop: steps, accumulation, validation, metrics, checkpoints, and a clean end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
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
#include <lockstep/train/named_checkpoints.h>
#include <lockstep/train/options.h>
#include <lockstep/train/reporter.h>
#include <lockstep/train/stepper.h>
#include <lockstep/train/stop_request.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// The batch that options ask for, on so many ranks with samples of their own. UsageError if it is
// none.
Batch asked_batch(const TrainerOptions& options, std::int64_t num_ranks);

// Every rank makes one, with the same arguments, and calls the same functions at the same points.
// The model is distributed over the ranks at the first of them, unless it is already.
//
// A step's batch has the same samples for every number of ranks and of accumulated passes that give
// the batch the same size, and its gradient is divided by the number of samples or tokens in the
// whole batch. So the layout does not change the answer.
//
// Ownership: shares task, datasets and job. Threading: one thread. While fit() runs it handles
// SIGINT, SIGTERM and SIGHUP: at the first signal all ranks save after the same step and fit()
// returns. Failure: UsageError before the first step if something cannot work; TrainingStopped; the
// errors of checkpoints and communication.
class Trainer {
 public:
  using Dataset = std::shared_ptr<const data::Dataset>;

  Trainer(DistributedManager dist, std::shared_ptr<Task> task, TrainerOptions options,
          std::shared_ptr<const Callbacks> callbacks = std::make_shared<Callbacks>());
  ~Trainer();

  // Trains as long as the options say; `validation` may be null. The next fit() begins anew from
  // the weights that there are, unless train_epoch() or load_checkpoint() came in between.
  TrainingResult fit(Dataset training, Dataset validation);
  // One pass over the data, or what is left of the one that load_checkpoint() found.
  EpochEnd train_epoch(Dataset training);

  // Loss and metrics over all samples; a step of 0 before the first.
  Validation evaluate(const Dataset& dataset, Weights weights);
  // Runs `output` on all samples and puts what it gives, [samples, …], into the data set's order,
  // in the host's memory: on the main rank, or on all. The others get an undefined tensor.
  enum class Where { main_rank, all_ranks };
  at::Tensor predict(const Dataset& dataset,
                     const std::function<at::Tensor(const data::Batch&)>& output, Weights weights,
                     Where where);

  // One checkpoint, in a folder of its own.
  void save_checkpoint(const std::filesystem::path& folder);
  // From that folder, or from any checkpoint.
  void load_checkpoint(const std::filesystem::path& folder);

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
  // What any rank wants.
  struct Wishes {
    bool leave = false;  // a signal came, or nodes
    bool stop = false;   // a callback, or validations, said so
  };

  void keep_batch(const std::map<std::string, double>& values);
  void check_autocast() const;
  void check_batch_norms() const;
  void begin(const Dataset& training, const Dataset& validation);
  void make_stepper();
  void begin_anew();
  void run_loop(const Dataset& validation, const StopRequest& stop);
  bool finished() const;
  void count_steps();
  void leave_finished_epoch();
  bool due(std::int64_t interval) const { return interval > 0 && step_ % interval == 0; }
  void take_step();
  void train_step();
  void run_passes(std::optional<StepTimes>& times);
  void run_pipeline(PipelinePasses& pipeline, std::int64_t num_passes);
  double peak_flops() const;
  void note_progress(const char* phase) const { note_progress(phase, step_ + 1); }
  void note_progress(const char* phase, std::int64_t step) const;
  void report_settled();
  EpochEnd end_epoch();
  Wishes agree(Wishes wanted) const;

  bool runs_ahead() const { return stepper_->runs_ahead() && !options_.step_times; }
  void settle();
  void finish_step();
  template <typename Work>
  void or_give_up(const Work& work);
  template <typename Calls, typename Event>
  void call(const Calls& callbacks, const Event& event);

  // These are defined in trainer_evaluation.cpp.
  enum class Samples { in_training_order, in_their_own };
  std::unique_ptr<data::DataLoader> load_data(const Dataset& dataset, Samples order) const;
  bool take_stand_in(data::Batch& batch, const data::Dataset& dataset);
  std::optional<device::Autocast> low_precision() const;
  void validate(const Dataset& validation);
  void judge(Validation& validation);
  std::optional<Validation> measure(const Dataset& dataset, std::int64_t most_batches);
  void with(Weights weights, const std::function<void()>& work);

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
  void place_in_data(const data::SamplerState& position);
  RankMessages rank_messages() const { return RankMessages(dist_.world()); }
  void take_copy();
  void leave_copies();
  CheckpointContents contents();
  void save(Saving saving);
  void save_best();
  void poll_save();
  void finish_save();
  void heed(const SaveResult& saved);
  checkpoint::TrainingState state() const;

  DistributedManager dist_;
  std::shared_ptr<Task> task_;
  std::shared_ptr<torch::nn::Module> model_;
  TrainerOptions options_;
  std::shared_ptr<const Callbacks> callbacks_;
  Batch batch_;
  Dataset training_;
  std::unique_ptr<data::DataLoader> loader_;  // of training_
  // Where a run goes on in data that has not been given yet.
  std::optional<data::SamplerState> position_;
  std::unique_ptr<Stepper> stepper_;
  std::int64_t total_steps_ = 0;
  std::unique_ptr<Reporter> reporter_;         // only on the main rank
  std::shared_ptr<const FolderLock> lock_;     // only on the main rank, in a run with a folder
  std::unique_ptr<Checkpointer> checkpoints_;  // only in a run with a folder

  bool is_over_ = false;   // fit() has ended, and nothing has come since
  std::int64_t step_ = 0;  // steps done so far
  std::optional<StepTimes> unsettled_times_;
  std::optional<Settled> unreported_;
  std::int64_t samples_ = 0;  // seen by all ranks
  std::int64_t saved_step_ = 0;
  double epoch_loss_ = 0;             // summed over epoch_count_
  double epoch_count_ = 0;            // of this epoch's steps whose results are known
  std::int64_t epoch_steps_ = 0;      // of those
  bool wants_stop_ = false;           // on this rank
  std::int64_t not_better_ = 0;       // validations since the best
  std::optional<RankSpeeds> speeds_;  // only with several ranks
  TrainingResult result_;
};

}  // namespace lockstep::train
