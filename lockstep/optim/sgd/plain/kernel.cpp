#include <lockstep/optim/sgd/plain/kernel.h>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

template <typename T>
[[gnu::always_inline]] inline void update(const SgdStep<T> step, std::int64_t count,
                                          T* __restrict weight, const T* __restrict gradient,
                                          T* __restrict momentum_buffer) {
  if (momentum_buffer == nullptr) {
    for (std::int64_t i = 0; i < count; ++i) {
      const T g = gradient[i] + step.weight_decay * weight[i];
      weight[i] -= step.learning_rate * g;
    }
    return;
  }
  // The shares of the gradient and the momentum in the weight's step.
  const T own = step.nesterov ? T{1} : T{0};
  const T pushed = step.nesterov ? step.momentum : T{1};
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = gradient[i] + step.weight_decay * weight[i];
    const T b = step.momentum * momentum_buffer[i] + step.gradient_share * g;
    momentum_buffer[i] = b;
    weight[i] -= step.learning_rate * (own * g + pushed * b);
  }
}

}  // namespace

LOCKSTEP_SIMD void sgd_update(const SgdStep<float>& step, std::int64_t count,
                              float* __restrict weight, const float* __restrict gradient,
                              float* __restrict momentum_buffer) {
  update(step, count, weight, gradient, momentum_buffer);
}

LOCKSTEP_SIMD void sgd_update(const SgdStep<double>& step, std::int64_t count,
                              double* __restrict weight, const double* __restrict gradient,
                              double* __restrict momentum_buffer) {
  update(step, count, weight, gradient, momentum_buffer);
}

}  // namespace lockstep::optim
