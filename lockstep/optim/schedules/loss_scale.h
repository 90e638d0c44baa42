// By how much a loss is multiplied so that its gradients fit fp16, by DeepSpeed's rules. Plain
// numbers: no LibTorch. GradScaler applies them to tensors.
#pragma once

#include <cstdint>

namespace lockstep::optim {

// DeepSpeed's section `fp16`, by its names.
struct LossScaleOptions {
  double loss_scale = 0;  // one that never changes; 0 for a dynamic one
  int initial_scale_power = 16;
  std::int64_t loss_scale_window = 1000;
  std::int64_t hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
};

// The state that a checkpoint saves.
struct LossScaleState {
  double scale = 1;
  std::int64_t good_steps = 0;  // in a row, since the scale last changed or gradients overflowed
  std::int64_t hysteresis = 1;  // how many overflows, this one included, until the scale is halved

  bool operator==(const LossScaleState&) const = default;
};

// A dynamic scale starts at 2^initial_scale_power. An overflow uses up one of `hysteresis`, and
// halves the scale when there is one left; never below min_loss_scale. After `loss_scale_window`
// good steps in a row the scale doubles and the hysteresis is full again; with
// consecutive_hysteresis it is so after any good step. The scale stays a finite float: it does not
// double beyond that.
//
// A value, for one thread at a time. Ranks that begin alike and are told the same stay alike.
class LossScale {
 public:
  // UsageError, with the numbers, for options that make no sense.
  explicit LossScale(const LossScaleOptions& options);

  double value() const { return state_.scale; }

  // After each step: whether its gradients overflowed on any rank. Such a step is the caller's to
  // skip, and to report: neither weights nor the schedule move. UsageError, with what to try, where
  // the scale would have to fall below its minimum; the scale is then as before.
  void update(bool overflowed);

  const LossScaleState& state() const { return state_; }

  // Goes on from a saved state, within this scale's own options: a fixed scale stays what it is.
  // UsageError for numbers that no state has.
  void load_state(const LossScaleState& state);

 private:
  bool is_fixed() const { return options_.loss_scale != 0; }
  void shrink();

  LossScaleOptions options_;
  LossScaleState state_;
};

}  // namespace lockstep::optim
