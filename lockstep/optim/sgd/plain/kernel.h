// One step of gradient descent over plain memory, in one pass. Each element is computed by itself,
// with the same bits wherever a range is cut.
#pragma once

#include <cstdint>

namespace lockstep::optim {

// The numbers of one step, the same for every element.
template <typename T>
struct SgdStep {
  T learning_rate;
  T weight_decay;
  T momentum;
  T gradient_share;  // how much of a gradient enters the momentum: 1 - dampening, 1 in step one
  bool nesterov;
};

// The ranges, of `count` elements each, do not overlap. Without momentum, `momentum_buffer` is
// nullptr.
void sgd_update(const SgdStep<float>& step, std::int64_t count, float* weight,
                const float* gradient, float* momentum_buffer);
void sgd_update(const SgdStep<double>& step, std::int64_t count, double* weight,
                const double* gradient, double* momentum_buffer);

}  // namespace lockstep::optim
