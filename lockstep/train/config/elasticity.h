// DeepSpeed's elasticity: a batch that many numbers of ranks divide evenly.
#pragma once

#include <cstdint>
#include <vector>

#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/config.h>

namespace lockstep::train {

struct ElasticChoice {
  std::int64_t global = 0;                    // samples of a step
  std::vector<std::int64_t> even_data_ranks;  // that divide it evenly with some micro-batch, rising
};

// The batch that DeepSpeed chooses: of those that are a micro-batch size, or the least common
// multiple of all, times a number with many divisors, the one that the most numbers of ranks divide
// evenly. `ranks_together` of them have the same samples.
ElasticChoice choose_batch(const ElasticitySection& elasticity, std::int64_t ranks_together);

// What it comes to: with the largest micro-batch size that divides a rank's share, and on a number
// of ranks that divides nothing evenly, with shares that differ by one sample. UsageError where the
// ranks are fewer than min_gpus or more than max_gpus.
Batch elastic_batch(const ElasticitySection& elasticity, std::int64_t num_data_ranks,
                    std::int64_t ranks_together);

}  // namespace lockstep::train
