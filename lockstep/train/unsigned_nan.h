// Numbers for people to read.
#pragma once

#include <cmath>
#include <limits>

namespace lockstep::train {

// Which sign a NaN has depends on the processor, and says nothing.
inline double unsigned_nan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

}  // namespace lockstep::train
