#include <lockstep/optim/muon/plain/kernel.h>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

template <typename T>
[[gnu::always_inline]] inline void push_of(const MuonStep<T> step, std::int64_t count,
                                           const T* __restrict gradient, T* __restrict momentum,
                                           T* __restrict push) {
  const T again = step.nesterov ? step.momentum : T{1};
  const T fresh = step.nesterov ? step.one_minus_momentum : T{0};
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = gradient[i];
    const T m = step.momentum * momentum[i] + step.one_minus_momentum * g;
    momentum[i] = m;
    push[i] = again * m + fresh * g;
  }
}

template <typename T>
[[gnu::always_inline]] inline void move(T keep, T rate, std::int64_t count,
                                        const T* __restrict direction, T* __restrict weight) {
  for (std::int64_t i = 0; i < count; ++i) weight[i] = keep * weight[i] - rate * direction[i];
}

}  // namespace

LOCKSTEP_SIMD void muon_push(const MuonStep<float>& step, std::int64_t count,
                             const float* __restrict gradient, float* __restrict momentum,
                             float* __restrict push) {
  push_of(step, count, gradient, momentum, push);
}

LOCKSTEP_SIMD void muon_push(const MuonStep<double>& step, std::int64_t count,
                             const double* __restrict gradient, double* __restrict momentum,
                             double* __restrict push) {
  push_of(step, count, gradient, momentum, push);
}

LOCKSTEP_SIMD void muon_move(float keep, float rate, std::int64_t count,
                             const float* __restrict direction, float* __restrict weight) {
  move(keep, rate, count, direction, weight);
}

LOCKSTEP_SIMD void muon_move(double keep, double rate, std::int64_t count,
                             const double* __restrict direction, double* __restrict weight) {
  move(keep, rate, count, direction, weight);
}

}  // namespace lockstep::optim
