// A multiple of one range, taken from another. Each element is computed by itself, with the same
// bits wherever a range is cut.
#pragma once

#include <cstdint>

namespace lockstep::optim {

// The ranges, of `count` elements each, do not overlap.
void subtract(std::int64_t count, float factor, const float* what, float* from);
void subtract(std::int64_t count, double factor, const double* what, double* from);

}  // namespace lockstep::optim
