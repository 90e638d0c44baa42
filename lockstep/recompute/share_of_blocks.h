// Which of a model's blocks are recomputed where a share of them is. Plain numbers.
#pragma once

#include <cmath>
#include <cstddef>

namespace lockstep::activations {

inline std::size_t num_recomputed(std::size_t num_blocks, double ratio) {
  return static_cast<std::size_t>(std::lround(ratio * static_cast<double>(num_blocks)));
}

// Spread evenly over all of them.
inline bool is_recomputed(std::size_t block, std::size_t num_blocks, double ratio) {
  const std::size_t chosen = num_recomputed(num_blocks, ratio);
  return (block + 1) * chosen / num_blocks > block * chosen / num_blocks;
}

}  // namespace lockstep::activations
