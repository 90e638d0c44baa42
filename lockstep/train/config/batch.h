// The batch identity: samples of a step = samples of a micro-batch × micro-batches of a rank ×
// ranks. Where that does not come out even, the last micro-batch has fewer samples than the others,
// and some ranks have one fewer than others: a step has the same samples on any number of ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/train/config/config.h>

namespace lockstep::train {

struct Batch {
  std::int64_t micro = 0;         // samples of one forward pass, at most
  std::int64_t accumulation = 0;  // forward passes of a step on each rank
  std::int64_t global = 0;        // samples of a step on all ranks

  bool operator==(const Batch&) const = default;
};

// The batch that a run began with. It keeps it on another number of ranks.
struct BegunBatch {
  std::int64_t global = 0;
  std::int64_t micro = 0;      // what a rank's memory had room for
  std::int64_t num_ranks = 1;  // data-parallel ones, that had it last
  std::int64_t of_a_rank = 0;  // that a program asked for; 0: it asked for the samples of all ranks

  bool operator==(const BegunBatch&) const = default;
};

// As few passes as a step of `global` samples needs where none has more than `most_micro` on a
// rank, all of about the same size.
Batch divide_batch(std::int64_t global, std::int64_t num_ranks, std::int64_t most_micro);

// Fills in the numbers that were not given. Where all three are given they must fit together on so
// many data-parallel ranks: UsageError with all numbers, and near ones that would do. A run that
// has begun keeps its batch, if need be with another accumulation than was asked for. `num_ranks`
// counts ranks with samples of their own; each may stand for `ranks_together` ranks that work on
// the same samples, and messages count all of them.
Batch resolve_batch(const BatchSection& asked, std::int64_t num_ranks,
                    const std::optional<BegunBatch>& begun = {}, std::int64_t ranks_together = 1);

// The same for a whole config, whose `elasticity` may choose the batch.
Batch resolve_batch(const TrainConfig& config, std::int64_t num_ranks,
                    const std::optional<BegunBatch>& begun = {});

// A sentence about what is wrong on every number of ranks; "" where some number will do.
std::string batch_contradiction(const BatchSection& asked);

// A note for the log where ranks or passes have unequal shares, or where a run keeps its batch on
// another number of ranks; "" where there is nothing to say.
std::string batch_note(const Batch& batch, std::int64_t num_ranks,
                       const std::optional<BegunBatch>& begun = {},
                       std::int64_t ranks_together = 1);

// DeepSpeed's elasticity: a batch that many numbers of ranks divide evenly.
struct ElasticChoice {
  std::int64_t global = 0;  // samples of a step
  // Numbers of data-parallel ranks that divide it evenly with some micro-batch size, rising.
  std::vector<std::int64_t> even_data_ranks;
};

// The batch that DeepSpeed chooses. The candidates are each micro-batch size, and the least common
// multiple of all, times a number with many divisors; the one that the most numbers of ranks divide
// evenly wins. Groups of `ranks_together` ranks have the same samples.
ElasticChoice choose_batch(const ElasticitySection& elasticity, std::int64_t ranks_together);

// The batch that `elasticity` gives on so many ranks, with the largest micro-batch size that
// divides a rank's share. Where the ranks do not divide the batch evenly, shares differ by one
// sample. UsageError where the ranks are fewer than min_gpus or more than max_gpus.
Batch elastic_batch(const ElasticitySection& elasticity, std::int64_t num_data_ranks,
                    std::int64_t ranks_together);

}  // namespace lockstep::train
