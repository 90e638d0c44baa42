// One step of Lion over plain memory, in one pass. Each element is computed by itself, with the
// same bits wherever a range is cut.
#pragma once

#include <cstdint>

namespace lockstep::optim {

// The numbers of one step, the same for every element.
template <typename T>
struct LionStep {
  T beta1;
  T beta2;
  T one_minus_beta1;  // taken before rounding to T
  T one_minus_beta2;
  T learning_rate;
  T keep;  // what decay leaves of a weight
};

// The ranges, of `count` elements each, do not overlap.
void lion_update(const LionStep<float>& step, std::int64_t count, float* weight,
                 const float* gradient, float* exp_avg);
void lion_update(const LionStep<double>& step, std::int64_t count, double* weight,
                 const double* gradient, double* exp_avg);

}  // namespace lockstep::optim
