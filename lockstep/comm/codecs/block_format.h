// How numbers are sent in fewer bits: ZeRO++'s symmetric blocks. Each block of neighbouring numbers
// has a scale, and each number is sent as a small whole multiple of that scale.
//
// The length of a message depends only on n, its number of numbers, and on the format:
//
//   payload  int8: a byte for each. int4: a byte for two neighbours, the first in its low half;
//            after an odd number of them, the last byte's high half is 0. Two's complement.
//   padding  0 to 3 bytes of 0, so that scales, and a message after this one, lie at multiples of 4
//   scales   one float for each block, the last of which may have fewer numbers
//
// In the machine's byte order, which is little-endian everywhere we run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace lockstep::comm {

enum class QuantizedType : std::uint8_t {
  int8,  // from -127 to 127
  int4,  // from -7 to 7
};

// DeepSpeed takes up to 8000 weights or a matrix's row of gradients for one scale. 256 cost 1.6% of
// an int8 message and 3% of an int4 one, and one large number spoils the precision of that few.
struct BlockFormat {
  QuantizedType type = QuantizedType::int8;
  std::size_t block = 256;  // elements; even, so that a block starts with a byte
};

// UsageError, with the number, for a block that is 0 or odd.
void check_format(const BlockFormat& format);

std::size_t num_blocks(std::size_t count, const BlockFormat& format);

// The offset of the scales in the message of `count` elements, and the length of the message.
std::size_t scales_offset(std::size_t count, const BlockFormat& format);
std::size_t encoded_bytes(std::size_t count, const BlockFormat& format);

// Several messages of equally many numbers each, one after the other in memory.

// Parts of an array, row by row. Messages are made of them column by column: part (r, c) becomes
// message c · rows + r. With one row the order stays.
struct PartTable {
  std::size_t rows = 1;
  std::size_t columns = 1;
  std::size_t count = 0;  // numbers in a part

  std::size_t num_parts() const { return rows * columns; }
  // The part that becomes this message.
  std::size_t part_of(std::size_t message) const {
    return message % rows * columns + message / rows;
  }
};

// Messages that are added to parts of numbers: part p is the sum of messages p, p + parts, p + 2 ·
// parts and so on, one message for each term.
struct SumTable {
  std::size_t terms = 1;
  std::size_t parts = 1;
  std::size_t count = 0;  // numbers in a part

  std::size_t num_messages() const { return terms * parts; }
};

// The codec's loops on the CPU and its kernels on CUDA share the rest of this file, so that both
// give the same bits. It is C++17, as nvcc reads it.

// Magnitudes with these bits or larger ones are inf or nan.
constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// Adding this to a small number rounds the number to a whole one, which is then in the sum's low
// bits: the last bit of a float of this size counts ones.
constexpr float kRounder = 0x1.8p23f;

constexpr float kSmallestScale = std::numeric_limits<float>::min();

// The largest scale for which `most` times the scale is finite.
constexpr float largest_scale(int most) {
  const float scale = std::numeric_limits<float>::max() / static_cast<float>(most);
  const bool fits = double{scale} * most <= double{std::numeric_limits<float>::max()};
  // Returns the next smaller float if the quotient was rounded up.
  return fits ? scale : scale * (1 - std::numeric_limits<float>::epsilon() / 2);
}

}  // namespace lockstep::comm
