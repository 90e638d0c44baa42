#include <lockstep/optim/kernels/adam.h>

#include <cmath>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

template <typename T>
[[gnu::always_inline]] inline void update(const AdamStep<T> step, std::int64_t count,
                                          T* __restrict weight, const T* __restrict gradient,
                                          T* __restrict exp_avg, T* __restrict exp_avg_sq) {
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = gradient[i] + step.coupled_decay * weight[i];
    const T m = step.beta1 * exp_avg[i] + step.one_minus_beta1 * g;
    const T v = step.beta2 * exp_avg_sq[i] + step.one_minus_beta2 * (g * g);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    const T denominator = std::sqrt(v) * step.root_correction + step.eps;
    weight[i] = step.keep * weight[i] - step.step_size * (m / denominator);
  }
}

}  // namespace

LOCKSTEP_SIMD void adam_update(const AdamStep<float>& step, std::int64_t count,
                               float* __restrict weight, const float* __restrict gradient,
                               float* __restrict exp_avg, float* __restrict exp_avg_sq) {
  update(step, count, weight, gradient, exp_avg, exp_avg_sq);
}

LOCKSTEP_SIMD void adam_update(const AdamStep<double>& step, std::int64_t count,
                               double* __restrict weight, const double* __restrict gradient,
                               double* __restrict exp_avg, double* __restrict exp_avg_sq) {
  update(step, count, weight, gradient, exp_avg, exp_avg_sq);
}

}  // namespace lockstep::optim
