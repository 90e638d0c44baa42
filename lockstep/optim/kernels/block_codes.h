// Numbers as codes of 8 bits, a block of them with one scale. A code stands for a value from -1 to
// 1, or from 0 to 1, of a map that is dense near 0: the dynamic map of Dettmers et al., "8-bit
// Optimizers via Block-wise Quantization". The scale is the block's number of the largest
// magnitude, with its sign: that number is kept as it is.
//
// Decoded numbers that are encoded again give the same codes and scale, so that what is written
// down as floats comes back to the bit.
#pragma once

#include <array>
#include <cstdint>

namespace lockstep::optim {

inline constexpr std::int64_t kCodeBlock = 256;  // numbers of a block

enum class CodeMap : std::uint8_t { with_sign, without_sign };

// The value of each code, in rising order.
const std::array<float, 256>& values_of(CodeMap map);
// The code of 0.
std::uint8_t code_of_zero(CodeMap map);

// larger_scale() gives the number of larger magnitude, and the positive one of a number and its
// negative: the scale of two parts of a block together. 0 changes nothing.
float larger_scale(float one, float other);
float scale_of(const float* values, std::int64_t count);

// The nearest codes. The scale is that of the block. A block whose scale is below 2^-100 is taken
// as zeros: its products would have lost digits. Returns the scale to decode with.
float encode(CodeMap map, const float* values, std::int64_t count, float scale,
             std::uint8_t* codes);
void decode(CodeMap map, const std::uint8_t* codes, std::int64_t count, float scale, float* values);

}  // namespace lockstep::optim
