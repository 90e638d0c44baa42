#include <lockstep/optim/adagrad/plain/kernel.h>

#include <cmath>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

template <typename T>
[[gnu::always_inline]] inline void update(const AdagradStep<T> step, std::int64_t count,
                                          T* __restrict weight, const T* __restrict gradient,
                                          T* __restrict sum) {
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = gradient[i] + step.weight_decay * weight[i];
    const T s = sum[i] + g * g;
    sum[i] = s;
    weight[i] -= step.learning_rate * (g / (std::sqrt(s) + step.eps));
  }
}

}  // namespace

LOCKSTEP_SIMD void adagrad_update(const AdagradStep<float>& step, std::int64_t count,
                                  float* __restrict weight, const float* __restrict gradient,
                                  float* __restrict sum) {
  update(step, count, weight, gradient, sum);
}

LOCKSTEP_SIMD void adagrad_update(const AdagradStep<double>& step, std::int64_t count,
                                  double* __restrict weight, const double* __restrict gradient,
                                  double* __restrict sum) {
  update(step, count, weight, gradient, sum);
}

}  // namespace lockstep::optim
