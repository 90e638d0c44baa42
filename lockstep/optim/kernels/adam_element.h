// Adam's formula for one element, for the CPU's loop and the GPU's: written once, so that both have
// the same bits. No multiplication is fused with an addition, by the flags of both compilers.
#pragma once

#include <cmath>

#include <lockstep/optim/kernels/adam.h>

#ifdef __CUDACC__
#define LOCKSTEP_HOST_DEVICE __host__ __device__
#else
#define LOCKSTEP_HOST_DEVICE
#endif

namespace lockstep::optim {

template <typename T>
[[gnu::always_inline]] LOCKSTEP_HOST_DEVICE inline void adam_element(const AdamStep<T>& step,
                                                                     const T gradient, T& weight,
                                                                     T& exp_avg, T& exp_avg_sq) {
  const T g = gradient + step.coupled_decay * weight;
  const T m = step.beta1 * exp_avg + step.one_minus_beta1 * g;
  const T v = step.beta2 * exp_avg_sq + step.one_minus_beta2 * (g * g);
  exp_avg = m;
  exp_avg_sq = v;
  const T denominator = std::sqrt(v) * step.root_correction + step.eps;
  weight = step.keep * weight - step.step_size * (m / denominator);
}

}  // namespace lockstep::optim
