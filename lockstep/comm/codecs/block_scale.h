// What the codec's loops on the CPU and its kernels on CUDA share, so that both give the same bits.
// C++17, as nvcc reads it.
#pragma once

#include <cstdint>
#include <limits>

namespace lockstep::comm {

// From here on, a magnitude's bits are no number's.
constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// A float whose last bit counts ones. With a small number added, its low bits are that number,
// rounded to a whole one.
constexpr float kRounder = 0x1.8p23f;

constexpr float kSmallestScale = std::numeric_limits<float>::min();

// The largest scale that `most` times is finite.
constexpr float largest_scale(int most) {
  const float scale = std::numeric_limits<float>::max() / static_cast<float>(most);
  const bool fits = double{scale} * most <= double{std::numeric_limits<float>::max()};
  // The float below it.
  return fits ? scale : scale * (1 - std::numeric_limits<float>::epsilon() / 2);
}

}  // namespace lockstep::comm
