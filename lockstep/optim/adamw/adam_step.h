// The numbers of a step of Adam, from its options.
#pragma once

#include <cmath>

#include <lockstep/optim/adamw/plain/kernel.h>
#include <lockstep/optim/adamw/plain/options.h>
#include <lockstep/optim/elementwise_optimizer.h>

namespace lockstep::optim {

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

inline AdamStep<double> step_of(const AdamWOptions& options, const StepNumbers& numbers) {
  const auto& [beta1, beta2] = options.betas;
  const auto t = static_cast<double>(numbers.step);
  const bool decoupled = options.decay == AdamDecay::decoupled;
  const auto seen = [&](double beta) {
    return options.bias_correction ? 1 - std::pow(beta, t) : 1;
  };
  return {.beta1 = beta1,
          .beta2 = beta2,
          .one_minus_beta1 = 1 - beta1,
          .one_minus_beta2 = 1 - beta2,
          .eps = options.eps,
          .step_size = numbers.learning_rate / seen(beta1),
          .root_correction = 1 / std::sqrt(seen(beta2)),
          .keep = decoupled ? 1 - numbers.learning_rate * numbers.weight_decay : 1,
          .coupled_decay = decoupled ? 0 : numbers.weight_decay};
}

}  // namespace lockstep::optim
