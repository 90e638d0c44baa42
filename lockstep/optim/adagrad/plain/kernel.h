// One step of Adagrad over plain memory, in one pass. Each element is computed by itself, with the
// same bits wherever a range is cut.
#pragma once

#include <cstdint>

namespace lockstep::optim {

// The numbers of one step, the same for every element.
template <typename T>
struct AdagradStep {
  T learning_rate;
  T weight_decay;
  T eps;
};

// The ranges, of `count` elements each, do not overlap.
void adagrad_update(const AdagradStep<float>& step, std::int64_t count, float* weight,
                    const float* gradient, float* sum);
void adagrad_update(const AdagradStep<double>& step, std::int64_t count, double* weight,
                    const double* gradient, double* sum);

}  // namespace lockstep::optim
