// The direction of a step of LAMB over plain memory. Each element is computed by itself, with the
// same bits wherever a range is cut.
#pragma once

#include <cstdint>

namespace lockstep::optim {

// The numbers of one step, the same for every element.
template <typename T>
struct LambStep {
  T beta1;
  T beta2;
  T one_minus_beta1;  // taken before rounding to T
  T one_minus_beta2;
  T eps_inside;   // the root
  T eps_outside;  // of it; one of the two is 0
  T weight_decay;
};

// The ranges, of `count` elements each, do not overlap.
void lamb_direction(const LambStep<float>& step, std::int64_t count, const float* weight,
                    const float* gradient, float* exp_avg, float* exp_avg_sq, float* direction);
void lamb_direction(const LambStep<double>& step, std::int64_t count, const double* weight,
                    const double* gradient, double* exp_avg, double* exp_avg_sq, double* direction);

}  // namespace lockstep::optim
