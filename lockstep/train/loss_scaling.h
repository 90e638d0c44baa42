// The loss scale of a run in fp16, as the training loop needs it.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>

#include <torch/nn/module.h>

#include <lockstep/distributed/distributed.h>
#include <lockstep/optim/grad_scaler.h>

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

}  // namespace lockstep::train
