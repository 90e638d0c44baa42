// Loss scaling for training in fp16.
//
//   GradScaler scaler;
//   scaler.scale(loss).backward();
//   at::Tensor overflow = scaler.unscale(parameters);
//   group.all_reduce(overflow, comm::ReduceOp::max).wait();
//   if (scaler.update(overflow)) {
//     clip_gradients(parameters, 1.0);
//     optimizer->step(schedule->learning_rate(step++));
//   }
//   optimizer->zero_grad();
//
// bf16 needs no scale. GradScaler({.loss_scale = 1}) is DeepSpeed's check_grad_overflow for it: a
// step with gradients that are inf or nan is skipped.
#pragma once

#include <vector>

#include <lockstep/optim/parameters.h>
#include <lockstep/optim/schedules/loss_scale.h>

namespace lockstep::optim {

// Multiplies losses and divides gradients by a scale that follows DeepSpeed's rules (loss_scale.h).
// Owns the scale's few numbers only. For one thread at a time.
//
// Ranks that train one model have to skip the same steps: each tells what unscale() found on it,
// and all of them hand the greatest answer of all to update(). Those of one replica, whose pieces
// make up a model, are among them.
class GradScaler {
 public:
  // UsageError, with the numbers, for options that make no sense.
  explicit GradScaler(const LossScaleOptions& options = {}) : scale_(options) {}

  double loss_scale() const { return scale_.value(); }

  // For losses that are sums: over how many samples, or tokens, they are, the same number on all
  // ranks and until it is set again between two steps. The scale is then one of their mean, as
  // DeepSpeed's is, however large a batch is: the sum is multiplied by the scale over this number.
  // A power of two costs no digits. UsageError where it is no finite number above 0.
  void set_samples_per_sum(double samples);
  double samples_per_sum() const { return samples_per_sum_; }

  // The loss to call backward() on. A loss of 16 bits becomes Float, which the scaled one fits.
  // UsageError where it is not a floating-point tensor.
  at::Tensor scale(const at::Tensor& loss) const;

  // The same for whoever reads the loss that backward() is called on: it has the loss's own value,
  // and its gradients are scaled.
  at::Tensor scale_gradients_of(const at::Tensor& loss) const;

  // Divides the gradients by the scale, in place: once for each update(), when all of the step's
  // passes are done and before clipping. Gives 1 in a Float tensor of one element if a gradient is
  // inf or nan on this rank, and 0 if not (grad_scaler.cpp says which parameters are refused).
  // UsageError if it was called since the last update().
  //
  // In Half a gradient below 2^-24 is lost when it is divided: keep the parameters in Float and let
  // autocast (device/autocast.h) compute in fp16.
  at::Tensor unscale(const std::vector<NamedParameter>& parameters);

  // Ends the step with what the ranks agreed on, and tells whether the optimizer is to step: not if
  // a gradient overflowed anywhere. A tensor of one element is read here, which is the one wait for
  // the device in all of this. UsageError as LossScale::update(), on all ranks alike, and where a
  // tensor has not one element.
  [[nodiscard]] bool update(const at::Tensor& overflow);
  [[nodiscard]] bool update(bool overflowed);

  // The state that a checkpoint saves: three scalars of its own, on the CPU, the same on all ranks.
  std::vector<NamedTensor> state() const;

  // Goes on from what state() gave, within this scaler's own options: a fixed scale stays what it
  // is. UsageError, with what is wrong, where it is something else.
  void load_state(const std::vector<NamedTensor>& state);

 private:
  double factor() const { return loss_scale() / samples_per_sum_; }

  LossScale scale_;
  double samples_per_sum_ = 1;
  bool unscaled_ = false;
};

// Divides every gradient by `scale`, in place, and tells whether one of them is inf or nan then: a
// Float tensor of one element on the first parameter's device (the CPU where there is none), 1 if
// so and 0 if not. Float, Double, Half and BFloat16, each divided as if by itself: a gradient whose
// memory another one uses too, or that leaves gaps in it, gets memory of its own first. On the CPU
// one pass over memory; elsewhere nothing waits for the device. UsageError for parameters that
// check_distinct or gradient_of refuses and for other types, with all gradients as they were.
at::Tensor unscale_gradients(const std::vector<NamedParameter>& parameters, double scale);

// The same with LibTorch's operators alone, for gradients on one device that share no memory: how
// it is done where there are no loops of our own.
at::Tensor unscale_with_operators(const std::vector<at::Tensor>& gradients, double scale);

}  // namespace lockstep::optim
