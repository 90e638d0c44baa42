// 16-bit floats by their bits, to and from float, rounding to nearest even. Written without
// branches so that loops over them become vector code.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace lockstep {

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

inline float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t rest = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  // Read as a float's bits, `rest` is the value divided by 2^112, subnormals included.
  const float finite = std::bit_cast<float>(rest) * 0x1p112f;
  // Infinities and NaNs lack the upper bits of their exponent.
  const std::uint32_t special = (value.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(sign | special | std::bit_cast<std::uint32_t>(finite));
}

inline Float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 all has one exponent.
  const std::uint32_t exponent = std::max(magnitude & 0x7f800000u, 113u << 23);
  // A power of two that is 2^13 times as large, plus the value, has its last bit where the result
  // has it: the sum is rounded as the result is to be, and counts in units of that bit.
  const std::uint32_t larger = exponent + (13u << 23);
  const float sum = std::bit_cast<float>(larger) + std::bit_cast<float>(magnitude);
  const std::uint32_t units = std::bit_cast<std::uint32_t>(sum) - larger;
  // Values that are too large become infinity, whatever the sum above is.
  const std::uint32_t rounded = std::min((exponent >> 13) - (113u << 10) + units, 0x7c00u);
  // The sign of a difference: more comparisons would become branches.
  const std::uint32_t quiet_nan = ((0x7f800000u - magnitude) >> 22) & 0x0200u;
  return {static_cast<std::uint16_t>(sign | rounded | quiet_nan)};
}

}  // namespace lockstep
