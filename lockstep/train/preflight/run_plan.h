// A run's sizes, data and steps on a given number of ranks, worked out without LibTorch before any
// rank starts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include <lockstep/data/tokens/sequences.h>
#include <lockstep/models/spec/config.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/preflight/pipeline_plan.h>

namespace lockstep::train {

struct ResolvedRun {
  models::ModelConfig model;
  data::SequenceSet training;
  std::optional<data::SequenceSet> validation;
  Batch batch;
  std::optional<BegunBatch> begun;  // that it is kept from
  // The most samples of a forward pass on a rank that the run allows itself, on other ranks, too.
  std::int64_t most_micro = 0;
  std::optional<RunPipeline> pipeline;
  std::int64_t steps_per_epoch = 0;
  std::int64_t total_steps = 0;
  // The schedule, with the run's own length where the config left that open.
  optim::ScheduleOptions schedule;
};

// Opens the data, reads the config.json of a model that is trained further, and checks that all
// numbers fit together. UsageError with all that does not, the numbers and the way out. A run that
// has begun keeps its batch.
ResolvedRun resolve_run(const TrainConfig& config, int world_size,
                        const std::optional<BegunBatch>& begun = {});
// The same for a config that may have mistakes: it reports them together with those found here, and
// still makes the checks that do not depend on a wrong value.
ResolvedRun resolve_run(ConfigDraft& draft, int world_size,
                        const std::optional<BegunBatch>& begun = {});

// UsageError where the config's model is in a library: nothing is known of it before a rank loads
// it.
void check_is_built_in(const TrainConfig& config);
// What can be checked of such a run without the library: the batch of this number of ranks.
// UsageError with all mistakes.
Batch resolve_own_run(ConfigDraft& draft, int world_size,
                      const std::optional<BegunBatch>& begun = {});

// The ranks that share a step's samples.
struct BatchShares {
  std::int64_t num_data_ranks = 1;  // those that have samples of their own
  Batch batch;
};
// The same checks, as far as the number of ranks is concerned.
BatchShares share_batch(const TrainConfig& config, const models::ModelConfig& model, int world_size,
                        const std::optional<BegunBatch>& begun = {});

// The model alone. The data is opened only where the config leaves the size of the vocabulary to
// it; UsageError where it is not there either.
models::ModelConfig resolve_model(const TrainConfig& config);

// The loss, in nats, of a model that knows only how often each token occurs. Looks at the first
// 16 Mi tokens.
double unigram_entropy(const data::TokenStream& stream);

// How many steps a run has.

// Whichever ends first; at least one is given.
struct RunLength {
  std::optional<std::int64_t> max_steps;
  std::optional<std::int64_t> epochs;

  // How far a run is.
  struct Place {
    std::int64_t steps_done = 0;
    std::int64_t epoch = 0;
    std::int64_t steps_left = 0;  // of that epoch
  };

  // The steps of a whole run; where that is more than can be counted, the most that can.
  std::int64_t total_steps(std::int64_t steps_per_epoch) const {
    return total_steps(steps_per_epoch, {.steps_left = steps_per_epoch});
  }

  // The steps of a run that has come so far, perhaps with batches of another size: those that are
  // done and those that are left.
  std::int64_t total_steps(std::int64_t steps_per_epoch, const Place& place) const {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    std::int64_t total = kMost;
    if (epochs) {
      total = place.steps_done;
      const std::int64_t more = *epochs - place.epoch - 1;  // whole ones
      if (more > (kMost - total - place.steps_left) / steps_per_epoch)
        total = kMost;
      else if (more >= 0)
        total += place.steps_left + more * steps_per_epoch;
    }
    return std::min(total, std::max(max_steps.value_or(kMost), place.steps_done));
  }
};

}  // namespace lockstep::train
