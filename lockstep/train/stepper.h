// One optimizer step after another, as the training loop and the engine take them: backward passes
// that are counted over all ranks, the loss scale, clipping, the update and the learning rate.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/device/autocast.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/schedules/loss_scale.h>
#include <lockstep/optim/schedules/schedule.h>
#include <lockstep/train/averaged_weights.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// Every rank has one. backward() is called on sums over a batch, but the scale, as DeepSpeed's,
// applies to their mean. So the scaled loss is divided by the size of a step, rounded to a power of
// two; the size is that of the run's first step, and stays.
//
// Ownership: owns its numbers. Threading: one thread. Failure: UsageError as GradScaler.
class LossScaling {
 public:
  explicit LossScaling(const optim::LossScaleOptions& options)
      : scaler_(options), is_fixed_(options.loss_scale != 0) {}

  double value() const { return scaler_.loss_scale(); }
  // Whether the scale stays the same after an overflow.
  bool is_fixed() const { return is_fixed_; }

  // Called before the first pass of each step, on all ranks, with about how many samples (or
  // tokens) the step has on this rank. The ranks add these up until the sum is not 0.
  void begin_step(const DistributedManager& dist, double count);

  // Returns a loss to call backward() on, whose value is that of `loss_sum`.
  at::Tensor scale_gradients_of(const at::Tensor& loss_sum) const {
    return scaler_.scale_gradients_of(loss_sum);
  }

  // Unscales the step's gradients and returns whether they are finite: the same answer on all
  // ranks.
  [[nodiscard]] bool unscale(DistributedManager& dist,
                             const std::shared_ptr<torch::nn::Module>& model) {
    return dist.unscale_gradients(model, scaler_);
  }

  // The numbers that a checkpoint saves, and the way back. Loading a checkpoint of a run without a
  // scale leaves this one as it is.
  std::map<std::string, double> values() const;
  void load(const std::map<std::string, double>& values);

 private:
  optim::GradScaler scaler_;
  bool is_fixed_;
  bool knows_step_ = false;
};

// Makes numbers that people read the same on every processor, which differ in the sign of a NaN.
inline double unsigned_nan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

struct StepperOptions {
  optim::OptimizerOptions optimizer = optim::AdamWOptions{};
  double weight_decay = 0;
  optim::DecayRule decay_rule = optim::DecayRule::matrices;
  optim::ScheduleOptions schedule = optim::Constant{};
  double learning_rate = 0;      // what the schedule begins from
  double gradient_clipping = 0;  // 0: none
  NonFinite on_non_finite = NonFinite::stop;
  // What operators compute in while weights keep their type.
  std::optional<c10::ScalarType> autocast = {};
  std::optional<optim::LossScaleOptions> loss_scale = {};
  // Of an average of the weights that every step moves on; 0: none.
  double ema_decay = 0;
  std::uint64_t seed = 0;
};

// The result of a step. Loss, count and norm are those of all ranks.
struct StepResult {
  enum class Skipped {
    no,
    non_finite,
    overflow,          // the gradients exceed fp16's range
    nothing_to_learn,  // no sample or token of any rank counts
  };

  std::int64_t number = 0;  // from 1
  double loss = 0;          // mean over `count`
  double count = 0;
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  double loss_scale = 0;  // fp16's
  Skipped skipped = Skipped::no;
};

// A step after which training cannot go on; the weights are those before it. All ranks throw it at
// the same point.
class StepFailed : public Error {
 public:
  StepFailed(const StepResult& step, std::string what, std::string advice = "");

  const StepResult& step() const { return step_; }

  // The same, with a sentence that says what the user still has.
  std::string with(const std::string& sentence) const;

 private:
  StepResult step_;
  std::string what_;
  std::string advice_;
};

// Why a step was skipped, and what the loss scale is now, for people.
std::string describe_skipped(const StepResult& step, double loss_scale);

// How a loop cuts its data, with the names of what a user may change.
struct CutOfSteps {
  std::int64_t micro = 0;        // samples of a pass on a rank
  std::int64_t asked_micro = 0;  // what the user asked for
  std::int64_t global = 0;       // samples of a step
  bool drop_last = false;
  const char* name_of_micro = "";
  const char* name_of_drop_last = "";
};

// UsageError if a model with synchronised batch norms meets a pass in which some rank has no
// samples: it would leave the others waiting for its statistics.
void check_batch_norms(const DistributedManager& dist,
                       const std::shared_ptr<torch::nn::Module>& model,
                       const data::DataLoader& loader, const CutOfSteps& cut);

// UsageError if there is nothing to `what`, such as "train on". A sampler would throw the same
// error, but without a name.
void check_samples(const std::shared_ptr<const data::Dataset>& dataset, const char* what);

// Samples for a rank that has none in a pass of `micro`, and must run the model: two if that many
// are allowed, as batch norms want.
data::Batch stand_in(const data::Dataset& dataset, std::int64_t micro, c10::Device device);

// Puts a model into eval mode, and each of its parts back into the mode that it had.
class EvalMode {
 public:
  explicit EvalMode(const std::shared_ptr<torch::nn::Module>& model) : modules_(model->modules()) {
    for (const auto& module : modules_) was_training_.push_back(module->is_training());
    model->eval();
  }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;
  ~EvalMode() {
    for (std::size_t i = 0; i < modules_.size(); ++i) modules_[i]->train(was_training_[i]);
  }

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<bool> was_training_;
};

// Every rank makes one, with the same options, and calls the same functions at the same points. For
// each step: zero_gradients(), backward passes, settle() for the step before, update().
//
// Ownership: shares the model and the job; owns the optimizer. Threading: one thread. Failure:
// StepFailed; UsageError as DistributedManager; CommError.
class Stepper {
 public:
  // The model is distributed over the ranks already. Gives the random generators of each rank, or
  // of ranks that share their activations, a stream of their own, for modules that draw from them.
  Stepper(DistributedManager dist, std::shared_ptr<torch::nn::Module> model,
          StepperOptions options);

  const optim::Optimizer& optimizer() const { return *optimizer_; }
  optim::Optimizer& optimizer() { return *optimizer_; }
  double learning_rate() const { return schedule_->learning_rate(updates_); }
  // The learning rate belongs to the batch: a run that goes on with another may change it.
  void set_learning_rate(double learning_rate);
  bool scales_loss() const { return loss_scaling_.has_value(); }
  double loss_scale() const { return loss_scaling_ ? loss_scaling_->value() : 1; }

  // Autocast while it lives, where the options say so.
  std::optional<device::Autocast> low_precision() const;

  void zero_gradients() { optimizer_->zero_grad(); }

  enum class Exchange { now, later };
  // Backward of one of a step's passes. Those before the last exchange gradients later, or as they
  // come where DistributedConfig::exchange_gradients says so. `num_passes` is how many the step
  // has. `counts` is false for samples that stand in on a rank that has none.
  void backward(nn::LossSum loss, std::int64_t num_passes, Exchange exchange, bool counts = true);
  // All passes of a step at once, as a pipeline runs them. `run` gets what makes the tensor on
  // which backward is called; it is empty where there is no loss scale. It returns the sum of the
  // losses and what they count, which is about `expected`.
  void backward_passes(std::int64_t expected,
                       const std::function<PassesLoss(const GradientScale&)>& run);

  // Updates the weights, unless the loss or the gradients' norm is not finite, which only the
  // device knows when this returns.
  void update(std::int64_t step);
  // Waits for the last update; nothing where its result was given before.
  std::optional<StepResult> settle();
  bool is_settled() const { return !unsettled_; }
  // Whether the host may go on to the next step while a GPU works on this one. It may not where the
  // next step's loss scale depends on this one.
  bool runs_ahead() const { return dist_.device().is_cuda() && !loss_scaling_; }

  // Steps whose update was made: the schedule counts these.
  std::int64_t updates() const { return updates_; }

  // The numbers of a checkpoint that are the stepper's, and the way back. UsageError that calls the
  // checkpoint `what` if they make no sense.
  std::map<std::string, double> values() const;
  void load(const checkpoint::TrainingState& state, const std::string& what);
  // Only throws what load() would.
  static void check(const checkpoint::TrainingState& state, const std::string& what);

  // Null where the options ask for none.
  AveragedWeights* averaged() { return averaged_.get(); }

  // What may be missing in a checkpoint, as tensors of one, to be filled from it: the states of
  // this rank's random generators, which stay as they are if the run had fewer ranks or another
  // device, and the averaged weights, which begin with the weights if it had none.
  std::vector<mesh::HeldTensor> beside_model() const;
  void restored(const std::vector<mesh::HeldTensor>& beside_model,
                const checkpoint::TrainingState& state);
  // Model, optimizer and those, as tensors of a checkpoint.
  std::vector<mesh::HeldTensor> held();
  // Fills all of them from a checkpoint of any layout.
  checkpoint::TrainingState restore(const std::filesystem::path& checkpoint);

 private:
  struct Unsettled {
    StepResult result;
    device::HostCopy numbers;  // count, mean loss, gradient norm and factor of the update
  };

  bool unscale(StepResult& step);
  void count_update(StepResult& step, bool done);

  DistributedManager dist_;
  std::shared_ptr<torch::nn::Module> model_;
  StepperOptions options_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<optim::Schedule> schedule_;
  std::unique_ptr<AveragedWeights> averaged_;
  std::optional<LossScaling> loss_scaling_;  // only in fp16
  std::optional<Unsettled> unsettled_;
  bool first_pass_ = true;
  int skips_in_a_row_ = 0;
  std::int64_t updates_ = 0;
};

}  // namespace lockstep::train
