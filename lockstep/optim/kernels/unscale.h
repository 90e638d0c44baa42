// Divides gradients by the loss scale and looks for what is not finite, in one pass over plain
// memory. Each element is computed by itself, with the same bits wherever a range is cut.
#pragma once

#include <cstdint>

#include <lockstep/base/float16.h>

namespace lockstep::optim {

// Whether an element is inf or nan once it is divided. 16-bit floats are divided as floats.
bool unscale(float* gradient, std::int64_t count, float scale);
bool unscale(double* gradient, std::int64_t count, double scale);
bool unscale(Float16* gradient, std::int64_t count, float scale);
bool unscale(BFloat16* gradient, std::int64_t count, float scale);

}  // namespace lockstep::optim
