// The batch identity: samples of a step = samples of a micro-batch × micro-batches of a rank ×
// ranks.
#pragma once

#include <cstdint>

#include <lockstep/train/config.h>

namespace lockstep::train {

struct Batch {
  std::int64_t micro = 0;         // samples of one forward pass
  std::int64_t accumulation = 0;  // forward passes of a step on each rank
  std::int64_t global = 0;        // samples of a step on all ranks

  bool operator==(const Batch&) const = default;
};

// Fills in what was not given. UsageError with all numbers, and near ones that would do, where they
// do not fit together on so many data-parallel ranks.
Batch resolve_batch(const BatchSection& asked, std::int64_t world_size);

inline Batch resolve_batch(const TrainConfig& config, std::int64_t world_size) {
  return resolve_batch(config.batch, world_size);
}

// What is wrong on any number of ranks, as a sentence: "" where some number will do.
std::string batch_contradiction(const BatchSection& asked);

}  // namespace lockstep::train
