// Streams of random numbers, which do not depend on how they are cut into calls.
#pragma once

#include <cstdint>

namespace lockstep::nn {

// Writes elements [offset, offset + count) of the stream of normal random numbers with this key.
void normals_of_stream(std::uint64_t key, std::uint64_t offset, std::int64_t count, double std,
                       float* out);

// Writes elements [first, first + count) of one sample's mask of dropout: 0 where the random word
// is below `threshold`, else `kept`.
void mask_of_sample(std::uint64_t key, std::uint64_t row, std::int64_t first, std::int64_t count,
                    std::uint32_t threshold, float kept, float* out);

}  // namespace lockstep::nn
