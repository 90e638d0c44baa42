#include <lockstep/optim/kernels/sum_of_squares.h>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

template <typename T>
[[gnu::always_inline]] inline double fold(const T* __restrict values, std::int64_t count) {
  constexpr std::int64_t kHalf = kNormBlock / 2;
  alignas(64) double sums[kHalf];
  // Zeros beyond the end add nothing, so they need not be read: only where both halves have an
  // element is there something to add.
  const std::int64_t low = count < kHalf ? count : kHalf;
  const std::int64_t both = count > kHalf ? count - kHalf : 0;
  for (std::int64_t i = 0; i < both; ++i) {
    const double a = values[i];
    const double b = values[i + kHalf];
    sums[i] = a * a + b * b;
  }
  for (std::int64_t i = both; i < low; ++i) {
    const double a = values[i];
    sums[i] = a * a;
  }
  for (std::int64_t i = low; i < kHalf; ++i) sums[i] = 0;
  for (std::int64_t width = kHalf / 2; width > 0; width /= 2)
    for (std::int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

}  // namespace

LOCKSTEP_SIMD double sum_of_squares(const float* values, std::int64_t count) {
  return fold(values, count);
}

LOCKSTEP_SIMD double sum_of_squares(const double* values, std::int64_t count) {
  return fold(values, count);
}

}  // namespace lockstep::optim
