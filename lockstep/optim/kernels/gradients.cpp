#include <lockstep/optim/kernels/gradients.h>

#include <bit>

#include <lockstep/base/float16.h>
#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

// Divides one element where it is; its bits are what comes back.
[[gnu::always_inline]] inline std::uint32_t divide(float& value, float scale) {
  value /= scale;
  return std::bit_cast<std::uint32_t>(value);
}
[[gnu::always_inline]] inline std::uint64_t divide(double& value, double scale) {
  value /= scale;
  return std::bit_cast<std::uint64_t>(value);
}
[[gnu::always_inline]] inline std::uint16_t divide(Float16& value, float scale) {
  return value.bits = to_float16(to_float(value) / scale).bits;
}
[[gnu::always_inline]] inline std::uint16_t divide(BFloat16& value, float scale) {
  return value.bits = to_bfloat16(to_float(value) / scale).bits;
}

// `exponent` has the bits that are all set in inf and nan, and in nothing else.
template <typename T, typename Scale, typename Bits>
[[gnu::always_inline]] inline bool divide_and_look(T* __restrict gradient, std::int64_t count,
                                                   Scale scale, Bits exponent) {
  Bits found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const Bits bits = divide(gradient[i], scale);
    found |= static_cast<Bits>((bits & exponent) == exponent);
  }
  return found != 0;
}

}  // namespace

LOCKSTEP_SIMD bool unscale(float* gradient, std::int64_t count, float scale) {
  return divide_and_look(gradient, count, scale, std::uint32_t{0x7f800000});
}

LOCKSTEP_SIMD bool unscale(double* gradient, std::int64_t count, double scale) {
  return divide_and_look(gradient, count, scale, std::uint64_t{0x7ff0000000000000});
}

LOCKSTEP_SIMD bool unscale(Float16* gradient, std::int64_t count, float scale) {
  return divide_and_look(gradient, count, scale, std::uint16_t{0x7c00});
}

LOCKSTEP_SIMD bool unscale(BFloat16* gradient, std::int64_t count, float scale) {
  return divide_and_look(gradient, count, scale, std::uint16_t{0x7f80});
}

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

LOCKSTEP_SIMD void subtract(std::int64_t count, float factor, const float* __restrict what,
                            float* __restrict from) {
  for (std::int64_t i = 0; i < count; ++i) from[i] -= factor * what[i];
}

LOCKSTEP_SIMD void subtract(std::int64_t count, double factor, const double* __restrict what,
                            double* __restrict from) {
  for (std::int64_t i = 0; i < count; ++i) from[i] -= factor * what[i];
}

}  // namespace lockstep::optim
