// Rotary position embedding (Su et al., 2021), in the half-split form that Hugging Face's weights
// use: dim i of a head turns together with dim i + head_dim/2.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep::nn {

// Turns queries and keys by angles that grow with their position.
//
// Ownership: holds tables of cosines and sines, in float, on the device that was used last and for
// the longest sequence so far. Threading: one thread at a time. Failure: UsageError for positions
// beyond the model's.
class Rotary {
 public:
  // UsageError for an odd head_dim.
  Rotary(std::int64_t head_dim, std::int64_t max_positions, double theta);

  // Turns x [batch, heads, length, head_dim], whose first token has position `first`; 16-bit inputs
  // are turned in float.
  at::Tensor apply(const at::Tensor& x, std::int64_t first = 0);

  // Turns x whose tokens have the positions of the intervals, one after the other, for a sequence
  // that ranks share (sequence_split.h). UsageError if the number of positions is not x's length.
  at::Tensor apply(const at::Tensor& x, const std::vector<mesh::Interval>& positions);

 private:
  // Makes tables for at least so many positions, on that device.
  void need(std::int64_t positions, const at::Device& device);

  std::int64_t half_;  // half of head_dim
  std::int64_t max_positions_;
  double theta_;
  at::Tensor cosines_;  // [positions, head_dim/2]
  at::Tensor sines_;
};

}  // namespace lockstep::nn
