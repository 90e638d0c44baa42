// The sum of squares of a block of elements, in double and in one order: the block, filled up with
// zeros, is folded in half until one number is left. A GPU folds in the same order
// (optim/sum_of_squares.h), so the bits are the same on every device.
#pragma once

#include <cstdint>

namespace lockstep::optim {

inline constexpr std::int64_t kNormBlock = 4096;  // elements

// For 0 <= count <= kNormBlock.
double sum_of_squares(const float* values, std::int64_t count);
double sum_of_squares(const double* values, std::int64_t count);

}  // namespace lockstep::optim
