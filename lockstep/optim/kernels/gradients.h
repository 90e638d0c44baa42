// Loops over gradients in plain memory. Each element, or each block of a norm, is computed by
// itself, with the same bits wherever a range is cut.
#pragma once

#include <cstdint>

namespace lockstep {
struct BFloat16;
struct Float16;
}  // namespace lockstep

namespace lockstep::optim {

// Divides gradients by the loss scale and looks for what is not finite, in one pass over memory:
// whether an element is inf or nan once it is divided. 16-bit floats are divided as floats.
bool unscale(float* gradient, std::int64_t count, float scale);
bool unscale(double* gradient, std::int64_t count, double scale);
bool unscale(Float16* gradient, std::int64_t count, float scale);
bool unscale(BFloat16* gradient, std::int64_t count, float scale);

inline constexpr std::int64_t kNormBlock = 4096;  // elements

// The sum of squares of a block, in double and in one order: the block, filled up with zeros, is
// folded in half until one number is left. A GPU folds in the same order (optim/sum_of_squares.h),
// so the bits are the same on every device. For 0 <= count <= kNormBlock.
double sum_of_squares(const float* values, std::int64_t count);
double sum_of_squares(const double* values, std::int64_t count);

// Subtracts a multiple of one range from another. The ranges, of `count` elements each, do not
// overlap.
void subtract(std::int64_t count, float factor, const float* what, float* from);
void subtract(std::int64_t count, double factor, const double* what, double* from);

}  // namespace lockstep::optim
