// Which gradients travel together.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace lockstep::replicate {

// A gradient as the plan sees it.
struct GradientSize {
  std::size_t bytes = 0;
  int kind = 0;  // gradients of different kinds (dtype, device) cannot share a bucket
};

struct BucketLimits {
  // The first bucket is small, so that communication starts early in backward.
  std::size_t first_bytes = std::size_t{1} << 20;
  std::size_t bytes = std::size_t{25} << 20;
};

// Cuts gradients, in the order in which they become ready, into buckets that hold at most the limit
// unless one gradient alone is larger. Buckets come in the order in which they are complete; each
// lists its gradients in the order given.
std::vector<std::vector<std::size_t>> plan_buckets(std::span<const GradientSize> gradients,
                                                   std::span<const std::size_t> order,
                                                   const BucketLimits& limits);

}  // namespace lockstep::replicate
