#include <lockstep/optim/lamb/plain/kernel.h>

#include <cmath>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

template <typename T>
[[gnu::always_inline]] inline void direct(const LambStep<T> step, std::int64_t count,
                                          const T* __restrict weight, const T* __restrict gradient,
                                          T* __restrict exp_avg, T* __restrict exp_avg_sq,
                                          T* __restrict direction) {
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = gradient[i];
    const T m = step.beta1 * exp_avg[i] + step.one_minus_beta1 * g;
    const T v = step.beta2 * exp_avg_sq[i] + step.one_minus_beta2 * (g * g);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    const T denominator = std::sqrt(v + step.eps_inside) + step.eps_outside;
    direction[i] = m / denominator + step.weight_decay * weight[i];
  }
}

}  // namespace

LOCKSTEP_SIMD void lamb_direction(const LambStep<float>& step, std::int64_t count,
                                  const float* __restrict weight, const float* __restrict gradient,
                                  float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                  float* __restrict direction) {
  direct(step, count, weight, gradient, exp_avg, exp_avg_sq, direction);
}

LOCKSTEP_SIMD void lamb_direction(const LambStep<double>& step, std::int64_t count,
                                  const double* __restrict weight,
                                  const double* __restrict gradient, double* __restrict exp_avg,
                                  double* __restrict exp_avg_sq, double* __restrict direction) {
  direct(step, count, weight, gradient, exp_avg, exp_avg_sq, direction);
}

}  // namespace lockstep::optim
