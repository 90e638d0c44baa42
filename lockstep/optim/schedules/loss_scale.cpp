#include <lockstep/optim/schedules/loss_scale.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::optim {

namespace {

constexpr double kLargestScale = std::numeric_limits<float>::max();
constexpr int kLargestPower = std::numeric_limits<float>::max_exponent - 1;

constexpr const char* kWhatToTry =
    "look for a loss, an input or a weight that is inf or nan, lower the learning rate or warm it "
    "up for longer, or train in bf16, whose range needs no loss scale";

bool is_scale(double value) { return value > 0 && value <= kLargestScale; }

void check(const LossScaleOptions& options) {
  if (options.loss_scale != 0) {
    if (!is_scale(options.loss_scale))
      throw UsageError("loss_scale is {}: give a number above 0 that fits a float, or 0 for a "
                       "dynamic scale",
                       options.loss_scale);
    return;
  }
  if (options.initial_scale_power < 0 || options.initial_scale_power > kLargestPower)
    throw UsageError("initial_scale_power is {}: the loss scale starts at two to this power, from "
                     "0 to {}",
                     options.initial_scale_power, kLargestPower);
  if (options.loss_scale_window < 1)
    throw UsageError("loss_scale_window is {}: the number of good steps before the loss scale "
                     "doubles is 1 or more",
                     options.loss_scale_window);
  if (options.hysteresis < 1)
    throw UsageError("hysteresis is {}: the number of overflows that halve the loss scale is 1 or "
                     "more",
                     options.hysteresis);
  const double initial = std::ldexp(1, options.initial_scale_power);
  if (!(options.min_loss_scale > 0) || options.min_loss_scale > initial)
    throw UsageError("min_loss_scale is {}: give a number above 0, up to the {} that "
                     "initial_scale_power {} starts with",
                     options.min_loss_scale, initial, options.initial_scale_power);
}

}  // namespace

LossScale::LossScale(const LossScaleOptions& options) : options_(options) {
  check(options);
  state_ = {.scale = is_fixed() ? options.loss_scale : std::ldexp(1, options.initial_scale_power),
            .hysteresis = is_fixed() ? 1 : options.hysteresis};
}

void LossScale::update(bool overflowed) {
  if (is_fixed()) {
    if (overflowed)
      log::debug("gradients overflow at the fixed loss scale of {}: this step is skipped",
                 state_.scale);
    return;
  }
  if (overflowed) {
    shrink();
    state_.good_steps = 0;
    return;
  }
  if (options_.consecutive_hysteresis) state_.hysteresis = options_.hysteresis;
  if (++state_.good_steps < options_.loss_scale_window) return;
  state_.good_steps = 0;
  state_.hysteresis = options_.hysteresis;
  if (state_.scale * 2 <= kLargestScale) state_.scale *= 2;
}

void LossScale::shrink() {
  const double minimum = options_.min_loss_scale;
  if (state_.hysteresis > 1) {
    --state_.hysteresis;
    log::debug("gradients overflow at a loss scale of {}: this step is skipped, and the scale is "
               "halved after {} more",
               state_.scale, state_.hysteresis);
    return;
  }
  if (state_.scale == minimum)
    throw UsageError("gradients overflow at the smallest loss scale there may be, min_loss_scale = "
                     "{}, so that a smaller one would not help: {}",
                     minimum, kWhatToTry);
  const double before = state_.scale;
  state_.scale = std::max(before / 2, minimum);
  log::debug("gradients overflow at a loss scale of {}: this step is skipped, and the scale is now "
             "{}",
             before, state_.scale);
  if (state_.scale == minimum)
    log::warn("the loss scale has fallen to its minimum, min_loss_scale = {}; if gradients "
              "overflow again, training ends: {}",
              minimum, kWhatToTry);
}

void LossScale::load_state(const LossScaleState& state) {
  if (!is_scale(state.scale) || state.good_steps < 0 || state.hysteresis < 1)
    throw UsageError("the saved loss scale is {} after {} good steps with a hysteresis of {}: no "
                     "run leaves that, so the checkpoint is damaged or not of a loss scale",
                     state.scale, state.good_steps, state.hysteresis);
  if (is_fixed()) return;
  state_ = {.scale = std::max(state.scale, options_.min_loss_scale),
            .good_steps = state.good_steps,
            .hysteresis = std::min(state.hysteresis, options_.hysteresis)};
}

}  // namespace lockstep::optim
