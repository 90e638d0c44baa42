// The inside of an engine, for its chapters: engine.cpp makes it and takes steps,
// engine_batches.cpp has loaders, whole steps and evaluations, and engine_checkpoints.cpp what is
// on disk.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/engine.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/module_pipeline.h>
#include <lockstep/train/named_checkpoints.h>
#include <lockstep/train/reporter.h>
#include <lockstep/train/stepper.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// Where a step is: in which of its passes, and what this one has.
class EnginePasses {
 public:
  explicit EnginePasses(std::int64_t of_a_step) : of_a_step_(of_a_step), in_this_step_(of_a_step) {}

  // The loader gives the pass a batch: of this many samples of this rank, and of all.
  void give(std::int64_t samples, std::int64_t samples_of_all) {
    at_ = At::given;
    samples_ = samples;
    samples_of_all_ = samples_of_all;
  }
  // The step has fewer passes, at the end of an epoch.
  void shorten(std::int64_t in_this_step) { in_this_step_ = in_this_step; }
  void note_backward() { at_ = At::backwards; }
  // Ends the pass. Returns whether the step is over.
  bool end() {
    leave();
    if (++done_ < in_this_step_) return false;
    const std::int64_t samples = samples_of_step_;
    *this = EnginePasses(of_a_step_);
    samples_of_step_ = samples;
    return true;
  }
  // Ends a pass beside those of the step, whose gradients stay on the rank until its last.
  void end_without_step() {
    leave();
    has_kept_ = true;
  }
  // Forgets a batch that was given, and on which nothing was done.
  void drop_unused() {
    if (done_ > 0 || at_ != At::given) return;
    at_ = At::none;
    samples_ = kOwn;
    samples_of_all_ = 0;
    in_this_step_ = of_a_step_;
  }
  std::int64_t take_samples() { return std::exchange(samples_of_step_, 0); }

  bool is_between_steps() const { return done_ == 0 && at_ == At::none; }
  // Whether gradients of passes that took no step() wait on the rank.
  bool has_kept() const { return has_kept_; }
  bool is_first() const { return done_ == 0; }
  bool is_last() const { return done_ + 1 >= in_this_step_; }
  bool has_batch() const { return at_ == At::given; }
  bool has_loss() const { return at_ == At::backwards; }
  // Whether the pass's samples are only there so that this rank runs the model.
  bool stands_in() const { return at_ != At::none && samples_ == 0; }
  std::int64_t samples() const { return samples_; }
  std::int64_t in_this_step() const { return in_this_step_; }
  std::int64_t num_done() const { return done_; }

 private:
  enum class At { none, given, backwards };

  void leave() {
    at_ = At::none;
    samples_ = kOwn;
    samples_of_step_ += std::exchange(samples_of_all_, 0);
  }

  std::int64_t of_a_step_;
  std::int64_t in_this_step_;
  std::int64_t done_ = 0;
  bool has_kept_ = false;
  At at_ = At::none;
  std::int64_t samples_ = kOwn;  // of this rank
  std::int64_t samples_of_all_ = 0;
  std::int64_t samples_of_step_ = 0;

  static constexpr std::int64_t kOwn = -1;  // of the program's own
};

// What an engine leaves in the folder of its run: the config, metrics of each step, and checkpoints
// that nobody asked for. Every rank makes one; the main rank's writes. Without `output` in the
// config it writes what output_path of a monitor names, and else nothing.
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

// The data of one epoch, or of an evaluation.
class EngineCore::Epoch {
 public:
  // An evaluation has all samples, in the data set's order.
  enum class For { training, evaluation };

  Epoch(std::shared_ptr<const data::Dataset> of, const DistributedManager& dist,
        const TrainConfig& config, const Batch& batch, For use);

  std::shared_ptr<const data::Dataset> dataset;
  data::DataLoader loader;
};

// All that an engine knows between two calls. Threading and failure are those of Engine.
struct EngineCore::State {
  State(const EngineConfig& of, const std::function<std::shared_ptr<torch::nn::Module>()>& make,
        const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks,
        const InitializeOptions& options);

  // These are defined in engine.cpp.

  // Begins a call that all ranks make between two steps. Gradients that no_sync() keeps on the
  // ranks stay there, but are no part of a checkpoint.
  enum class Kept { may_be, must_not_be };
  void begin_call(const char* what, Kept kept = Kept::may_be);
  void refuse_in_pipeline(const char* what, const char* instead) const;
  void refuse_under_no_sync(const char* what) const;
  // Called before anything of a pass: by the loader or, without one, by backward().
  void begin_pass();
  void backward(nn::LossSum loss);
  void step();
  // Ends a step whose passes are done.
  void update();
  // Takes the result of the last step, once the host has it.
  void settle();
  void note_result(const StepResult& step);
  // A failure is thrown by the next call that all ranks make, so that all of them throw it there.
  void throw_failure();
  template <typename Work>
  void keep_failure(const Work& work);
  // Where the next step begins in the data.
  void note_position();
  void begin_next_epoch();
  void end_of(double StepTimes::*part) {
    if (clock) clock->add_to(*times.*part);
  }
  RankMessages ranks() const { return RankMessages(dist.world()); }
  // A model's output in the 32 bits of losses.
  at::Tensor widened(at::Tensor output) const;

  // The model is in eval mode while one lives. Autocast that is used meanwhile is no backward
  // pass's.
  class Evaluation {
   public:
    explicit Evaluation(State& state) : state_(state), mode_(state.model) {}
    Evaluation(const Evaluation&) = delete;
    Evaluation& operator=(const Evaluation&) = delete;
    ~Evaluation() { state_.autocast_used = false; }

   private:
    State& state_;
    EvalMode mode_;
  };

  // These are defined in engine_batches.cpp.

  // The loss of a pipeline's last stage.
  OutputLoss staged(const BatchLoss& loss) const;
  // Runs the passes of a step, which `passes` knows of already.
  void run_pipeline(const std::vector<MicroBatch>& batches, const BatchLoss& loss);

  // These are defined in engine_checkpoints.cpp.

  std::filesystem::path save(const std::filesystem::path& folder, const std::string& tag,
                             const std::map<std::string, std::string>& client_state);
  std::filesystem::path own_checkpoints() const;
  checkpoint::TrainingState training_state() const;
  // The batch of a run that goes on: what it began with, unless the config asks for another now.
  std::optional<BegunBatch> begun_batch_of(const checkpoint::TrainingState& loaded) const;

  TrainConfig config;
  DistributedManager dist;
  Batch batch;
  std::unique_ptr<ModulePipeline> stages;  // null where each rank has all layers
  std::shared_ptr<torch::nn::Module> model;
  std::optional<Stepper> stepper;
  std::optional<RunReport> report;
  NamedCheckpoints checkpoints{dist};
  int num_no_sync = 0;  // guards that live

  EnginePasses passes{1};
  bool autocasts = autocast_of(config, dist.device()).has_value();
  bool autocast_used = false;       // in this pass
  std::shared_ptr<Epoch> epoch;     // whose batches are being worked on; null without a loader
  std::shared_ptr<Epoch> prepared;  // the same, or the last one, which the next may use again
  data::SamplerState position;      // where the next step begins in the data

  bool step_has_begun = false;     // for the run's report
  std::optional<PartClock> clock;  // within a step whose times are measured
  std::optional<StepTimes> times, unsettled_times;
  std::int64_t own_samples = 0;        // of batches that train_batch() was given, of all ranks
  std::int64_t unsettled_samples = 0;  // of the last step; 0 where nobody knows
  StepResult last;
  double last_loss = 0;
  std::optional<std::string> failure;  // of the last step, not thrown yet
  std::int64_t num_steps = 0;
  std::int64_t num_skipped = 0;
  std::int64_t num_samples = 0;  // that loaders gave
};

}  // namespace lockstep::train
