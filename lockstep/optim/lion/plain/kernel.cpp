#include <lockstep/optim/lion/plain/kernel.h>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

template <typename T>
[[gnu::always_inline]] inline void update(const LionStep<T> step, std::int64_t count,
                                          T* __restrict weight, const T* __restrict gradient,
                                          T* __restrict exp_avg) {
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = gradient[i];
    const T m = exp_avg[i];
    const T push = step.beta1 * m + step.one_minus_beta1 * g;
    const T sign = push > 0 ? T{1} : push < 0 ? T{-1} : T{0};
    weight[i] = step.keep * weight[i] - step.learning_rate * sign;
    exp_avg[i] = step.beta2 * m + step.one_minus_beta2 * g;
  }
}

}  // namespace

LOCKSTEP_SIMD void lion_update(const LionStep<float>& step, std::int64_t count,
                               float* __restrict weight, const float* __restrict gradient,
                               float* __restrict exp_avg) {
  update(step, count, weight, gradient, exp_avg);
}

LOCKSTEP_SIMD void lion_update(const LionStep<double>& step, std::int64_t count,
                               double* __restrict weight, const double* __restrict gradient,
                               double* __restrict exp_avg) {
  update(step, count, weight, gradient, exp_avg);
}

}  // namespace lockstep::optim
