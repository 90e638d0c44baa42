// The batch identity: samples of a step = samples of a micro-batch × micro-batches of a rank ×
// ranks. Where that does not come out even, the last micro-batch has fewer samples than the others,
// and some ranks have one fewer than others: a step has the same samples on any number of ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/train/config/config.h>

namespace lockstep::train {

struct Batch {
  std::int64_t micro = 0;         // samples of one forward pass, at most
  std::int64_t accumulation = 0;  // forward passes of a step on each rank
  std::int64_t global = 0;        // samples of a step on all ranks

  bool operator==(const Batch&) const = default;
};

// What a run began with. It goes on with that on another number of ranks.
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

// Fills in what was not given. Where all three are given they must fit together on so many
// data-parallel ranks: UsageError with all numbers, and near ones that would do. A run that has
// begun keeps its batch, by another accumulation than was asked for where it takes that. The ranks
// are those with samples of their own; each may stand for some that work together, of which
// messages speak.
Batch resolve_batch(const BatchSection& asked, std::int64_t num_ranks,
                    const std::optional<BegunBatch>& begun = {}, std::int64_t ranks_together = 1);

// The same with `elasticity`, which says on how many ranks it works.
Batch resolve_batch(const TrainConfig& config, std::int64_t num_ranks,
                    const std::optional<BegunBatch>& begun = {});

// What is wrong on any number of ranks, as a sentence: "" where some number will do.
std::string batch_contradiction(const BatchSection& asked);

// For whoever watches, where ranks or passes have unequal shares, or a run keeps its batch on
// another number of ranks; "" where there is nothing to say.
std::string batch_note(const Batch& batch, std::int64_t num_ranks,
                       const std::optional<BegunBatch>& begun = {},
                       std::int64_t ranks_together = 1);

}  // namespace lockstep::train
