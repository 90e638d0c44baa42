// The options of a trainer, and the result of a run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/base/error.h>
#include <lockstep/observe/loss_curve.h>
#include <lockstep/observe/metrics.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/parameters.h>
#include <lockstep/optim/schedules/loss_scale.h>
#include <lockstep/optim/schedules/schedule.h>
#include <lockstep/train/config/config.h>

namespace lockstep {
class PeerCopies;
}

namespace lockstep::train {

// How the learning rate grows with the number of ranks, and so with the batch.
enum class LearningRateScaling {
  none,
  linear,       // by the number of ranks (Goyal et al., 2017)
  square_root,  // by the square root of the number of ranks
};

// The weights that a model computes with.
enum class Weights {
  trained,
  averaged,  // their moving average, which TrainerOptions::ema_decay asks for
};

// The number by which validations are judged.
struct Judge {
  enum class Better { smaller, larger };

  std::string metric = "validation_loss";  // or the name of a metric that was added
  Better better = Better::smaller;
  // A change of this size or less is no improvement.
  double min_delta = 0;
};

struct TrainerOptions {
  // The run ends at whichever comes first. At least one must be given.
  std::optional<std::int64_t> max_steps = {};
  std::optional<std::int64_t> epochs = {};

  // Samples of a forward pass on a rank, and forward passes of a step. A step has batch_size ·
  // accumulation samples on each rank; at the end of an epoch it has fewer, or drop_last leaves it
  // out. A run that goes on with another number of ranks keeps the number of samples that its steps
  // began with, in passes of at most batch_size.
  std::int64_t batch_size = 32;
  std::int64_t accumulation = 1;
  // Samples of a step on all ranks, whatever their number; replaces `accumulation`.
  std::optional<std::int64_t> samples_per_step = {};
  bool drop_last = false;
  bool shuffle = true;
  // Threads that load ahead; with 0, a batch is loaded when it is needed. If a dataset draws random
  // numbers from LibTorch's generator in get(), only 0 makes a run repeatable and a resumed run the
  // same: with threads, chance decides which thread draws first. data::augmented() does not.
  int num_workers = 1;
  int prefetch = 2;

  optim::OptimizerOptions optimizer = optim::AdamWOptions{};
  double learning_rate = 1e-3;
  LearningRateScaling learning_rate_scaling = LearningRateScaling::none;
  double weight_decay = 0;
  optim::DecayRule decay_rule = optim::DecayRule::matrices;
  optim::ScheduleOptions schedule = optim::Constant{};
  double gradient_clipping = 0;  // 0: none
  NonFinite on_non_finite = NonFinite::stop;

  // BFloat16 or Half: the type that operators compute in where that is safe, while weights keep
  // theirs. For models whose gradients are not cut among ranks; the others use MixedPrecision.
  std::optional<c10::ScalarType> autocast = {};
  // The loss scale. Training in Half has one even if this is not set. A step whose gradients
  // overflow is skipped on all ranks, which is not a failure.
  std::optional<optim::LossScaleOptions> loss_scale = {};

  // Steps between validations; 0: one at the end of each epoch. The run's end always has one.
  std::int64_t validation_interval = 0;
  std::int64_t validation_batches = 0;  // batches of each validation; 0: the whole set

  Weights validation_weights = Weights::trained;
  Judge judge = {};
  // Early stopping: the run ends after so many validations in a row without an improvement; 0: it
  // does not.
  std::int64_t patience = 0;
  // Whether each validation that is the best so far leaves a checkpoint in the run's folder, in
  // `best`, in place of the one before.
  bool keep_best = false;

  // The exponential moving average of the weights, which each step moves on by 1 − ema_decay; 0:
  // none. Checkpoints have it. It takes as much memory on each rank as its part of the weights.
  double ema_decay = 0;

  std::uint64_t seed = 0;

  // The run's folder, for checkpoints, metrics.csv, loss.svg and TensorBoard's files. Empty: no
  // files are written.
  std::filesystem::path output = {};
  std::int64_t checkpoint_interval = 0;  // steps; 0: only at the end
  int keep_checkpoints = 2;              // how many of the newest are kept; 0: all
  // Whether training goes on while a checkpoint is written from a copy. The run always waits for
  // its last checkpoint.
  bool asynchronous_checkpoints = true;
  // Steps between copies of the run's state in the memory of other ranks; 0: no copies. They are
  // kept in `peer_copies`, which the process makes once and keeps when the job is formed anew
  // (keep_going.h). A trainer that gets it then goes on from the latest copy, if the ranks together
  // still have all of it and no checkpoint is newer.
  std::int64_t memory_interval = 0;
  std::shared_ptr<PeerCopies> peer_copies = {};
  Resume resume = Resume::automatic;
  // With Resume::from, the run starts from this checkpoint; its own folder must not have
  // checkpoints of later steps. A run that has begun may remove it if it is in the run's folder.
  std::filesystem::path resume_from = {};
  bool csv = true;
  bool tensorboard = true;
  std::filesystem::path csv_folder = {};          // empty: `output`
  std::filesystem::path tensorboard_folder = {};  // empty: `output`/tensorboard

  // Floating-point operations that forward and backward take for one token or sample. With it, on a
  // GPU that Lockstep knows, the share of the GPU's peak (MFU) is shown beside the rate. 6 times
  // the number of weights that are multiplied is close for most models. 0: not shown.
  double flops_per_unit = 0;

  // Whether the times of a step's parts are measured and kept with the metrics. On a GPU this costs
  // time, because each part waits for the device.
  bool step_times = false;

  std::int64_t steps_per_print = 10;  // used where progress is no terminal
  // The descriptor to which the main rank writes progress; -1: none.
  int progress_fd = 1;
  std::string title = {};                                            // title of the loss curve
  std::optional<observe::LossCurve::Reference> reference_loss = {};  // a line in it
  std::string config = {};  // kept as config.json and in checkpoints, for people to read
};

// The result of a run.
struct TrainingResult {
  enum class End {
    finished,
    interrupted,  // by a signal; the run can be resumed
    left,     // nodes have come (keep_going.h): the run goes on with them in the next generation
    stopped,  // by a callback, or as validations no longer improved
  };

  End end = End::finished;
  int signal = 0;  // the signal that interrupted the run, on any rank
  std::int64_t step = 0;
  std::int64_t resumed_after = 0;         // the step from which the run went on; 0 if it began
  double loss = 0;                        // loss of the last step
  std::optional<double> validation_loss;  // at the end
  std::vector<observe::Metric> validation_metrics;
  double units_per_second = 0;       // tokens or samples, over the whole run
  std::int64_t skipped_steps = 0;    // of the whole run, including the part before it was resumed
  std::filesystem::path checkpoint;  // the last one; empty if none was written
  // The best validation, as the options judge it; nothing without one.
  std::optional<double> best;
  std::int64_t best_step = 0;
  std::filesystem::path best_checkpoint;  // empty if none was written
  // The errno with which the main rank could not write its progress: EPIPE if nobody reads it any
  // more, 0 if nothing was lost.
  int output_error = 0;
};

// What callbacks are told, on every rank. Numbers are those of all ranks together.
struct StepEnd {
  std::int64_t step = 0;  // from 1
  double loss = 0;
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  bool was_skipped = false;  // the loss or a gradient was not finite, or nothing counted
};
struct EpochEnd {
  std::int64_t epoch = 0;  // passes over the data that are complete
  std::int64_t step = 0;
  double loss = 0;  // mean over the samples of the epoch, or of what a resumed run had left of it
  std::int64_t steps = 0;  // of the epoch, or of that rest
};
struct Validation {
  std::int64_t step = 0;
  double loss = 0;
  std::vector<observe::Metric> metrics = {};
  bool is_best = false;  // so far, as the options judge it
};

// What a callback wants.
enum class Then { go_on, stop };

struct Callbacks {
  std::vector<std::function<Then(const StepEnd&)>> on_step = {};
  std::vector<std::function<Then(const EpochEnd&)>> on_epoch = {};
  std::vector<std::function<Then(const Validation&)>> on_validation = {};
};

// Every rank gives up the run at the same point, for a reason that only its user can mend. It is
// enough if one rank prints it.
class TrainingStopped : public Error {
 public:
  using Error::Error;
};

// Throws UsageError if a number makes no sense. The loader, the optimizer and the schedule check
// their own options.
void check(const TrainerOptions& options);
// Throws UsageError if nothing says when a run ends.
void check_length(const TrainerOptions& options);

// The options that must be alike on all ranks, a line each; the schedule is compared by its
// results.
std::vector<std::string> lines_of(const TrainerOptions& options);

}  // namespace lockstep::train
