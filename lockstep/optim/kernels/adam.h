// One step of Adam over plain memory: weight, gradient and both averages are read once and written
// once. Each element is computed by itself, with the same bits wherever a range is cut.
#pragma once

#include <cstdint>

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

// The ranges, of `count` elements each, do not overlap.
void adam_update(const AdamStep<float>& step, std::int64_t count, float* weight,
                 const float* gradient, float* exp_avg, float* exp_avg_sq);
void adam_update(const AdamStep<double>& step, std::int64_t count, double* weight,
                 const double* gradient, double* exp_avg, double* exp_avg_sq);

}  // namespace lockstep::optim
