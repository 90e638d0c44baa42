// The precision that a model computes in.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::plan {

enum class Precision : std::uint8_t { fp32, bf16, fp16 };

// Bytes of a float, for data that is never in 16 bits.
inline constexpr std::int64_t kFloat = 4;

inline constexpr std::int64_t bytes_of(Precision precision) {
  return precision == Precision::fp32 ? 4 : 2;
}

const char* name_of(Precision precision);
// "fp32", "bf16" or "fp16"; also LibTorch's and DeepSpeed's names for them. UsageError for others.
Precision precision_named(std::string_view name);

}  // namespace lockstep::plan
