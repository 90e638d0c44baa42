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

// Every rank has one. What backward() is called on are sums over a batch, and a scale is one of
// their mean, as DeepSpeed's is: the size of a step, rounded to a power of two, stands between
// them. It is that of the run's first step, and stays.
//
// Ownership: of its numbers. Threading: one thread. Failure: UsageError as GradScaler.
class LossScaling {
 public:
  explicit LossScaling(const optim::LossScaleOptions& options)
      : scaler_(options), is_fixed_(options.loss_scale != 0) {}

  double value() const { return scaler_.loss_scale(); }
  // One that no overflow makes smaller.
  bool is_fixed() const { return is_fixed_; }

  // Before the first pass of each step, on all ranks: about how many samples (or tokens) the step
  // has on this one. Ranks talk about it until one has some.
  void begin_step(const DistributedManager& dist, double count);

  // The loss to call backward() on; it has its own value.
  at::Tensor scale_gradients_of(const at::Tensor& loss_sum) const {
    return scaler_.scale_gradients_of(loss_sum);
  }

  // Whether the step's gradients, unscaled now, fit: the same answer on all ranks.
  [[nodiscard]] bool unscale(DistributedManager& dist,
                             const std::shared_ptr<torch::nn::Module>& model) {
    return dist.unscale_gradients(model, scaler_);
  }

  // What a checkpoint has to save, among other numbers; and back. A checkpoint of a run that had no
  // scale leaves this one as it is.
  std::map<std::string, double> values() const;
  void load(const std::map<std::string, double>& values);

 private:
  optim::GradScaler scaler_;
  bool is_fixed_;
  bool knows_step_ = false;
};

// For people to read: the sign of a NaN depends on the processor and says nothing.
inline double unsigned_nan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

}  // namespace lockstep::train
