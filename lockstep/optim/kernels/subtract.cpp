#include <lockstep/optim/kernels/subtract.h>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

LOCKSTEP_SIMD void subtract(std::int64_t count, float factor, const float* __restrict what,
                            float* __restrict from) {
  for (std::int64_t i = 0; i < count; ++i) from[i] -= factor * what[i];
}

LOCKSTEP_SIMD void subtract(std::int64_t count, double factor, const double* __restrict what,
                            double* __restrict from) {
  for (std::int64_t i = 0; i < count; ++i) from[i] -= factor * what[i];
}

}  // namespace lockstep::optim
