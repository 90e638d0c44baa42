// How a trainer trains, and what comes of it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/base/error.h>
#include <lockstep/observe/loss_curve.h>
#include <lockstep/observe/metrics.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/parameter_group.h>
#include <lockstep/optim/schedules/loss_scale.h>
#include <lockstep/optim/schedules/schedule.h>
#include <lockstep/train/config/config.h>

namespace lockstep {
class PeerCopies;
}

namespace lockstep::train {

// What more ranks, and so a larger batch, do to the learning rate.
enum class LearningRateScaling {
  none,
  linear,       // by the number of ranks (Goyal et al., 2017)
  square_root,  // by its root
};

struct TrainerOptions {
  // How long: whichever comes first. At least one must be given.
  std::optional<std::int64_t> max_steps = {};
  std::optional<std::int64_t> epochs = {};

  // Samples of a forward pass on a rank, and forward passes of a step: a step has batch_size ·
  // accumulation samples a rank, fewer at the end of an epoch, unless drop_last leaves that step
  // out. A run that goes on with another number of ranks keeps the samples of a step that it began
  // with, in passes of at most batch_size.
  std::int64_t batch_size = 32;
  std::int64_t accumulation = 1;
  // In place of accumulation: samples of a step on all ranks, however many there are.
  std::optional<std::int64_t> samples_per_step = {};
  bool drop_last = false;
  bool shuffle = true;
  // Threads that load ahead; 0 loads when a batch is needed. Where a dataset draws random numbers
  // from LibTorch's generator (an augmentation in get()), only 0 makes a run repeatable, and a
  // resumed one the same: with threads, who draws first is chance.
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

  // BFloat16 or Half: what operators compute in where that is safe, with weights as they are. For
  // models whose gradients are not cut among ranks; others have MixedPrecision.
  std::optional<c10::ScalarType> autocast = {};
  // The loss scale of training in Half, which has one in any case. A step whose gradients overflow
  // is skipped on all ranks, and is no failure.
  std::optional<optim::LossScaleOptions> loss_scale = {};

  // Steps between validations, besides one at the end. 0: at the end of each epoch.
  std::int64_t validation_interval = 0;
  std::int64_t validation_batches = 0;  // of each; 0: the whole set

  std::uint64_t seed = 0;

  // The run's folder: checkpoints, metrics.csv, loss.svg, TensorBoard's files. Empty: no files.
  std::filesystem::path output = {};
  std::int64_t checkpoint_interval = 0;  // steps; 0: only at the end
  int keep_checkpoints = 2;              // the newest so many; 0: all
  // Whether training goes on while a checkpoint is written, from a copy of what it holds; the last
  // one of a run is waited for in any case.
  bool asynchronous_checkpoints = true;
  // Steps between copies of the run's state in the memory of other ranks; 0: none. They are kept in
  // `peer_copies`, which its process makes once and keeps while the job is formed anew
  // (keep_going.h): a trainer that is made with it then goes on from the last of them, where its
  // ranks still have all of it and no checkpoint is newer.
  std::int64_t memory_interval = 0;
  std::shared_ptr<PeerCopies> peer_copies = {};
  Resume resume = Resume::automatic;
  // With Resume::from, the checkpoint to start from in place of the run's own, which has none of
  // later steps in its folder. A run that has begun may remove it, where it is one of its folder's.
  std::filesystem::path resume_from = {};
  bool csv = true;
  bool tensorboard = true;
  std::filesystem::path csv_folder = {};          // empty: `output`
  std::filesystem::path tensorboard_folder = {};  // empty: `output`/tensorboard

  // Floating-point operations that forward and backward of one token, or sample, take: with it, on
  // a GPU that Lockstep knows, the share of its peak (MFU) is told beside the rate. 6 times the
  // weights that are multiplied is close for most models. 0: not told.
  double flops_per_unit = 0;

  // Whether the times of a step's parts are measured and kept with the metrics. On a GPU this costs
  // time: each part waits for it.
  bool step_times = false;

  std::int64_t steps_per_print = 10;  // where progress is no terminal
  // Where progress goes; -1: nowhere. Only on the main rank.
  int progress_fd = 1;
  std::string title = {};                                            // of the loss curve
  std::optional<observe::LossCurve::Reference> reference_loss = {};  // a line in it
  std::string config = {};  // kept as config.json and in checkpoints, for whoever looks
};

// What came of a run.
struct TrainingResult {
  enum class End {
    finished,
    interrupted,  // by a signal; the run can be resumed
    left,  // nodes have come (keep_going.h): the run goes on with them in the next generation
  };

  End end = End::finished;
  int signal = 0;  // the one that interrupted it, on whichever rank
  std::int64_t step = 0;
  std::int64_t resumed_after = 0;         // the step of what it went on from; 0: nothing
  double loss = 0;                        // of the last step
  std::optional<double> validation_loss;  // at the end
  std::vector<observe::Metric> validation_metrics;
  double units_per_second = 0;       // tokens or samples, over the whole run
  std::int64_t skipped_steps = 0;    // of the whole run, also before it was resumed
  std::filesystem::path checkpoint;  // the last one; empty where none was written
  // The errno of the write with which the main rank lost the progress that it shows: EPIPE where
  // nobody reads it any more, 0 where nothing was lost.
  int output_error = 0;
};

// A run that every rank gives up at the same point, for a reason that only its user can mend: one
// rank need say it.
class TrainingStopped : public Error {
 public:
  using Error::Error;
};

// UsageError where a number makes no sense. Those of the loader, the optimizer and the schedule are
// theirs to check.
void check(const TrainerOptions& options);

// What all ranks must have alike, a line each; the schedule is compared by what comes of it.
std::vector<std::string> lines_of(const TrainerOptions& options);

}  // namespace lockstep::train
