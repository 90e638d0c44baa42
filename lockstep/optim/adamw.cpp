#include <lockstep/optim/adamw.h>

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/kernels/adam.h>

namespace lockstep::optim {

namespace {

void check_beta(int number, double beta) {
  // A NaN is refused, too.
  if (!(beta >= 0 && beta < 1))
    throw UsageError("AdamW: betas[{}] is {}; it must be at least 0 and below 1", number, beta);
}

template <typename T>
AdamStep<T> rounded(const AdamStep<double>& exact) {
  return {.beta1 = static_cast<T>(exact.beta1),
          .beta2 = static_cast<T>(exact.beta2),
          .one_minus_beta1 = static_cast<T>(exact.one_minus_beta1),
          .one_minus_beta2 = static_cast<T>(exact.one_minus_beta2),
          .eps = static_cast<T>(exact.eps),
          .step_size = static_cast<T>(exact.step_size),
          .root_correction = static_cast<T>(exact.root_correction),
          .keep = static_cast<T>(exact.keep),
          .coupled_decay = static_cast<T>(exact.coupled_decay)};
}

AdamStep<double> step_of(const AdamWOptions& options, const StepNumbers& numbers) {
  const auto [beta1, beta2] = options.betas;
  const auto t = static_cast<double>(numbers.step);
  const bool decoupled = options.decay == AdamDecay::decoupled;
  return {.beta1 = beta1,
          .beta2 = beta2,
          .one_minus_beta1 = 1 - beta1,
          .one_minus_beta2 = 1 - beta2,
          .eps = options.eps,
          .step_size = numbers.learning_rate / (1 - std::pow(beta1, t)),
          .root_correction = 1 / std::sqrt(1 - std::pow(beta2, t)),
          .keep = decoupled ? 1 - numbers.learning_rate * numbers.weight_decay : 1,
          .coupled_decay = decoupled ? 0 : numbers.weight_decay};
}

template <typename T>
void update_stretch(const AdamStep<double>& step, const Stretch<T>& stretch) {
  adam_update(rounded<T>(step), stretch.count, stretch.weight, stretch.gradient, stretch.state[0],
              stretch.state[1]);
}

}  // namespace

AdamW::AdamW(std::vector<ParameterGroup> groups, AdamWOptions options)
    : ElementwiseOptimizer(std::move(groups), {"exp_avg", "exp_avg_sq"}), options_(options) {
  check_beta(0, options.betas.first);
  check_beta(1, options.betas.second);
  if (!std::isfinite(options.eps) || options.eps < 0)
    throw UsageError("AdamW: eps is {}; it must be a number from 0 up", options.eps);
}

void AdamW::update(const StepNumbers& numbers, const Stretch<float>& stretch) const {
  update_stretch(step_of(options_, numbers), stretch);
}

void AdamW::update(const StepNumbers& numbers, const Stretch<double>& stretch) const {
  update_stretch(step_of(options_, numbers), stretch);
}

void AdamW::update(const StepNumbers& numbers, const at::Tensor& weight, const at::Tensor& gradient,
                   const std::vector<at::Tensor>& state) const {
  const AdamStep<double> step = step_of(options_, numbers);
  const at::Tensor g =
      step.coupled_decay == 0 ? gradient : at::add(gradient, weight, step.coupled_decay);
  state[0].mul_(step.beta1).add_(g, step.one_minus_beta1);
  state[1].mul_(step.beta2).addcmul_(g, g, step.one_minus_beta2);
  const at::Tensor denominator = state[1].sqrt().mul_(step.root_correction).add_(step.eps);
  weight.mul_(step.keep).addcdiv_(state[0], denominator, -step.step_size);
}

}  // namespace lockstep::optim
