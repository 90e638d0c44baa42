#include <lockstep/optim/kernels/unscale.h>

#include <bit>

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

}  // namespace lockstep::optim
