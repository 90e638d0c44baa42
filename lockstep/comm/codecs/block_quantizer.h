// Numbers to a message of symmetric blocks (block_format.h) and back, on plain memory.
//
//   scale = largest magnitude / (127 or 7), as a float
//   q     = x · (1 / scale), rounded to the nearest whole number, halfway to the even one
//   x'    = q · scale
//
// It promises:
// - x' is within half a scale of x, up to the roundings of a float. The block's largest is ±127 or
//   ±7 times the scale: it comes back to the last bit or the one beside it.
// - Encoding what was decoded, as floats, gives the same message again.
// - An inf or a nan never becomes a number: a block with one has a nan as its scale and zeros as
//   payload, so that all of it comes back as nan.
// - No finite float comes back as inf. A scale is at least the smallest normal float, also in a
//   block of zeros: magnitudes below half of that come back as 0, and -0 as 0.
// - The same bits on every CPU, with every instruction set, and on CUDA (block_kernels.h); where a
//   message or a sum gives a nan, its bits may differ.
//
// Any number of threads may call the functions, on different messages.
#pragma once

#include <cstddef>

#include <lockstep/comm/codecs/block_format.h>
#include <lockstep/comm/operations/operation.h>

namespace lockstep::comm {

// `values` are `count` float32, float16 or bfloat16; UsageError for another type or a bad format.
// All encoded_bytes(count, format) of the message are written. Values and message must not overlap,
// and need no alignment beyond a value's own.
void encode_blocks(const BlockFormat& format, DType dtype, const std::byte* values,
                   std::size_t count, std::byte* message);

// Decodes a message; 16-bit types are rounded once more.
void decode_blocks(const BlockFormat& format, DType dtype, const std::byte* message,
                   std::size_t count, std::byte* values);

// Messages of equally many elements, `stride` bytes apart.
struct Messages {
  const std::byte* first = nullptr;
  std::size_t number = 0;  // at least 1
  std::size_t stride = 0;
};

// Decodes the messages, adds them as floats in the canonical order (algorithms/reduction.h),
// divides the sum and rounds it to the type once, in one pass over the messages.
void decode_sum(const BlockFormat& format, DType dtype, const Messages& messages, std::size_t count,
                float divisor, std::byte* values);

}  // namespace lockstep::comm
