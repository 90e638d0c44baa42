#include <lockstep/optim/grad_scaler.h>

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/saved_state.h>
#include <lockstep/optim/unscale.h>

namespace lockstep::optim {

namespace {

at::Tensor at_least_float(const at::Tensor& loss) {
  if (!loss.defined()) throw UsageError("an undefined loss cannot be scaled");
  const auto type = loss.scalar_type();
  if (!at::isFloatingType(type))
    throw UsageError("a loss that is {} cannot be scaled: backward needs a floating-point one",
                     type_and_shape(loss));
  return type == at::kDouble ? loss : loss.to(at::kFloat);
}

}  // namespace

void GradScaler::set_samples_per_sum(double samples) {
  if (!(samples > 0) || !std::isfinite(samples))
    throw UsageError("a loss over {} samples cannot be scaled: give a finite number above 0",
                     samples);
  if (unscaled_)
    throw UsageError("the number of samples of a loss changed between unscale() and update(): set "
                     "it before the step's first backward()");
  samples_per_sum_ = samples;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return at::mul(at_least_float(loss), factor());
}

at::Tensor GradScaler::scale_gradients_of(const at::Tensor& loss) const {
  const at::Tensor wide = at_least_float(loss);
  // A tensor of its own, so that the caller's loss stays without a hook.
  const at::Tensor scaled = wide.view_as(wide);
  if (scaled.requires_grad())
    scaled.register_hook(
        [factor = factor()](const at::Tensor& gradient) { return gradient * factor; });
  return scaled;
}

at::Tensor GradScaler::unscale(const std::vector<NamedParameter>& parameters) {
  if (unscaled_)
    throw UsageError("gradients were unscaled twice in one step: call unscale() once, with all "
                     "parameters, and then update()");
  at::Tensor overflow = unscale_gradients(parameters, factor());
  unscaled_ = true;
  return overflow;
}

bool GradScaler::update(const at::Tensor& overflow) {
  if (!overflow.defined() || overflow.numel() != 1)
    throw UsageError("update() takes a tensor of one element, as unscale() gives it, but got {}",
                     overflow.defined() ? type_and_shape(overflow) : "an undefined one");
  return update(overflow.item<double>() != 0);
}

bool GradScaler::update(bool overflowed) {
  unscaled_ = false;
  scale_.update(overflowed);
  return !overflowed;
}

std::vector<NamedTensor> GradScaler::state() const {
  const LossScaleState& state = scale_.state();
  return {{"loss_scale", at::scalar_tensor(state.scale, at::kDouble)},
          {"loss_scale.good_steps", at::scalar_tensor(state.good_steps, at::kLong)},
          {"loss_scale.hysteresis", at::scalar_tensor(state.hysteresis, at::kLong)}};
}

void GradScaler::load_state(const std::vector<NamedTensor>& saved) {
  const std::vector<at::Tensor> matched = match_saved_state(state(), saved);
  scale_.load_state({.scale = matched[0].item<double>(),
                     .good_steps = matched[1].item<std::int64_t>(),
                     .hysteresis = matched[2].item<std::int64_t>()});
  unscaled_ = false;
}

}  // namespace lockstep::optim
