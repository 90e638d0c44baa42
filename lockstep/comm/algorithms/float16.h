// 16-bit floats as the wire has them, to and from float, rounding to nearest even. Written without
// branches so that loops over them become vector code.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep::comm {

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
  // As a float's bits `rest` is the value divided by 2^112, subnormals included.
  const float finite = std::bit_cast<float>(rest) * 0x1p112f;
  const std::uint32_t special = rest | 0x7f800000u;
  const std::uint32_t magnitude =
      (value.bits & 0x7c00u) == 0x7c00u ? special : std::bit_cast<std::uint32_t>(finite);
  return std::bit_cast<float>(sign | magnitude);
}

inline Float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Normal numbers: move the exponent's bias from 127 to 15 and round off 13 bits.
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal ones: adding 0.5 leaves a multiple of 2^-24, rounded, in the low bits.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u;
  std::uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // rounds up to infinity
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  return {static_cast<std::uint16_t>(sign | result)};
}

}  // namespace lockstep::comm
