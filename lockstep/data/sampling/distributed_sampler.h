// Which samples each rank works on, in which order.
#pragma once

#include <cstdint>
#include <vector>

#include <lockstep/data/sampling/permutation.h>

namespace lockstep::data {

struct SamplerOptions {
  std::int64_t size = 0;  // samples of the dataset
  int num_replicas = 1;   // ranks that divide it among them
  int rank = 0;           // which of them this is
  bool shuffle = true;    // another order each epoch, or the dataset's own
  std::uint64_t seed = 0;
  // What becomes of samples that are too few for one each: all are used, once, and some ranks have
  // one fewer than others; or they are left out; or the epoch's first are repeated.
  bool drop_last = false;
  bool pad_with_repeats = false;
};

// One rank's share of a global batch.
struct BatchShare {
  std::vector<std::int64_t> indices;  // of the dataset
  std::vector<std::int64_t> rows;     // the place of each in the global batch
  std::int64_t global_size = 0;       // samples of all ranks together
};

// How far a run has come: what a checkpoint keeps. Good for any number of ranks and any batch size.
struct SamplerState {
  std::int64_t epoch = 0;
  std::int64_t position = 0;  // of the epoch's order: how many samples all ranks have had
  // Of what it was taken from: another dataset or seed has another order.
  std::int64_t size = 0;
  std::uint64_t seed = 0;

  bool operator==(const SamplerState&) const = default;
};

// One order of all samples for each epoch, dealt to the ranks like cards: position k goes to rank
// k mod num_replicas, as PyTorch's DistributedSampler has it. A global batch is a stretch of
// positions, b·num_replicas of them where each rank has b, so it has the same samples for every
// number of ranks that gives it the same size.
//
// A value with random access: nothing is kept but the epoch. Every rank must be given the same
// options but for its rank. Not thread-safe while set_epoch() runs. UsageError where the options
// make no sense.
class DistributedSampler {
 public:
  explicit DistributedSampler(const SamplerOptions& options);

  const SamplerOptions& options() const { return options_; }
  std::int64_t epoch() const { return epoch_; }
  void set_epoch(std::int64_t epoch);

  // Positions of an epoch, of all ranks together: the dataset's size but for what drop_last leaves
  // out and pad_with_repeats adds.
  std::int64_t num_positions() const { return num_positions_; }
  // How many of them are this rank's.
  std::int64_t num_samples() const;

  // The sample at a position of the epoch's order.
  std::int64_t index_at(std::int64_t position) const;

  // The same on every rank; the last one may be smaller than the others.
  std::int64_t num_global_batches(std::int64_t batch_per_rank) const;

  // This rank's share of the `num_samples` from `position` on, or of those that the epoch has left,
  // in ascending order of rows: some ranks may have one more than others.
  BatchShare share_of(std::int64_t position, std::int64_t num_samples) const;
  // The same of the global batch that begins there: batch_per_rank samples, fewer or none where the
  // epoch ends.
  BatchShare share_at(std::int64_t position, std::int64_t batch_per_rank) const;
  // Of global batch `number`.
  BatchShare share(std::int64_t number, std::int64_t batch_per_rank) const;

  // Positions that a global batch takes; UsageError for a batch_per_rank that makes no sense.
  std::int64_t global_batch_size(std::int64_t batch_per_rank) const;

  SamplerState state(std::int64_t position) const;
  // The epoch becomes the state's; returns the position to go on from. UsageError where the state
  // is not of this order.
  std::int64_t load_state(const SamplerState& state);

 private:
  SamplerOptions options_;
  std::int64_t num_positions_ = 0;
  std::int64_t epoch_ = 0;
  Permutation order_;
};

}  // namespace lockstep::data
