// One step of Adam over plain memory: weight, gradient and both averages are read once and written
// once. Each element is computed by itself, with the same bits wherever a range is cut.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define LOCKSTEP_HOST_DEVICE __host__ __device__
#else
#define LOCKSTEP_HOST_DEVICE
#endif

namespace lockstep::optim {

// The numbers of one step, the same for every element.
template <typename T>
struct AdamStep {
  T beta1;
  T beta2;
  T one_minus_beta1;  // taken before rounding to T
  T one_minus_beta2;
  T eps;
  T step_size;        // learning rate / (1 - beta1^t)
  T root_correction;  // 1 / sqrt(1 - beta2^t)
  T keep;             // what decoupled decay leaves of a weight; 1 without
  T coupled_decay;    // how much of a weight is added to its gradient; 0 without
};

// The formula for one element, for the CPU's loop and the GPU's: written once, so that both have
// the same bits. No multiplication is fused with an addition, by the flags of both compilers.
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

// The ranges, of `count` elements each, do not overlap.
void adam_update(const AdamStep<float>& step, std::int64_t count, float* weight,
                 const float* gradient, float* exp_avg, float* exp_avg_sq);
void adam_update(const AdamStep<double>& step, std::int64_t count, double* weight,
                 const double* gradient, double* exp_avg, double* exp_avg_sq);

}  // namespace lockstep::optim
