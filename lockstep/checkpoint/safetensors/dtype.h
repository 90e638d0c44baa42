// The element types a safetensors file can hold.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace lockstep::checkpoint {

enum class DType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,  // two f32
  f64,
  i64,
  u64,
};

// As files spell it: "F32", "BOOL".
std::string_view name(DType dtype);

std::optional<DType> dtype_from_name(std::string_view name);

// Bits, as three of them have less than a byte.
unsigned bits_of(DType dtype);

// Whether a model's weights may be of it, and are converted to another such type where they must.
bool is_floating(DType dtype);

}  // namespace lockstep::checkpoint
