// What is asked of the targets of a loss.
#pragma once

#include <cstdint>

#include <lockstep/nn/cross_entropy.h>

namespace lockstep::nn::internal {

struct TargetShape {
  std::int64_t rows = 0;
  std::int64_t vocabulary = 0;
  std::int64_t ignore_index = 0;
};

// How many of `targets` are not to be ignored. UsageError where they are not int64 [rows] or one is
// outside the vocabulary. Waits for the device that holds them where they are not on the host, too.
std::int64_t count_targets(const char* function, const Targets& targets, const TargetShape& shape);

}  // namespace lockstep::nn::internal
