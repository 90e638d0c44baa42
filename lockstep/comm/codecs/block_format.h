// How numbers are sent in fewer bits: ZeRO++'s symmetric blocks. Each block of neighbours has a
// scale, and each of them is a small whole number of times that scale.
//
// The message of n numbers, whose length depends on nothing but n and the format:
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

// Where in the message of `count` elements the scales begin, and where the message ends.
std::size_t scales_offset(std::size_t count, const BlockFormat& format);
std::size_t encoded_bytes(std::size_t count, const BlockFormat& format);

}  // namespace lockstep::comm
