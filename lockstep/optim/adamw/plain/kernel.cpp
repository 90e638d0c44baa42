#include <lockstep/optim/adamw/plain/kernel.h>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

template <typename T>
[[gnu::always_inline]] inline void update(const AdamStep<T> step, std::int64_t count,
                                          T* __restrict weight, const T* __restrict gradient,
                                          T* __restrict exp_avg, T* __restrict exp_avg_sq) {
  for (std::int64_t i = 0; i < count; ++i)
    adam_element(step, gradient[i], weight[i], exp_avg[i], exp_avg_sq[i]);
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
