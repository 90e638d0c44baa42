// The order of an epoch's samples, and which of them each rank works on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lockstep::data {

// A pseudo-random permutation of [0, size) as a function of (seed, epoch). It computes any place at
// once and without memory, so that a resumed run starts anywhere, and is the same on every machine
// and in every version. It is a Feistel network over Philox on the next larger power of four,
// walked along its cycles until it is back inside: at most four steps on average (for sizes under
// 64 more, but never more than 256 for all places together).
//
// A value. Thread-safe.
class Permutation {
 public:
  // UsageError for a negative size or one of more than 2^62.
  Permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch);

  std::int64_t size() const { return size_; }

  // The number that stands at `place`, which is in [0, size).
  std::int64_t operator()(std::int64_t place) const;

 private:
  std::uint64_t step(std::uint64_t value) const;

  std::int64_t size_;
  std::uint64_t key_;
  std::uint64_t epoch_;
  int half_bits_;
};

struct SamplerOptions {
  std::int64_t size = 0;  // samples of the dataset
  int num_replicas = 1;   // ranks that divide it among them
  int rank = 0;           // which of them this is
  bool shuffle = true;    // another order each epoch, or the dataset's own
  std::uint64_t seed = 0;
  // At the end of an epoch there may be fewer samples than ranks. By default each is used once, and
  // some ranks have one fewer than others; drop_last leaves them out; pad_with_repeats gives the
  // other ranks the epoch's first samples again.
  bool drop_last = false;
  bool pad_with_repeats = false;
};

// One rank's share of a global batch.
struct BatchShare {
  std::vector<std::int64_t> indices;  // of the dataset
  std::vector<std::int64_t> rows;     // the place of each in the global batch
  std::int64_t global_size = 0;       // samples of all ranks together
};

// How far a run has come, for checkpoints. It holds for any number of ranks and any batch size.
struct SamplerState {
  std::int64_t epoch = 0;
  std::int64_t position = 0;  // of the epoch's order: how many samples all ranks have had
  // The dataset's size and the seed: with another dataset or seed, the order is another one.
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

  // Positions of an epoch on all ranks together: the dataset's size, less the samples that
  // drop_last leaves out, plus the repeats that pad_with_repeats adds.
  std::int64_t num_positions() const { return num_positions_; }
  // How many of these positions are this rank's.
  std::int64_t num_samples() const;

  // The sample at a position of the epoch's order.
  std::int64_t index_at(std::int64_t position) const;

  // The number is the same on every rank. The last batch may be smaller than the others.
  std::int64_t num_global_batches(std::int64_t batch_per_rank) const;

  // This rank's share of `num_samples` samples from `position` on, or of as many as the epoch has
  // left. Rows ascend; some ranks may have one more than others.
  BatchShare share_of(std::int64_t position, std::int64_t num_samples) const;
  // This rank's share of the global batch that begins at `position`: batch_per_rank samples, or
  // fewer at the end of the epoch.
  BatchShare share_at(std::int64_t position, std::int64_t batch_per_rank) const;
  // This rank's share of global batch `number`.
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

// Cuts an epoch into steps, and a step into the batches whose gradients are accumulated. A plan, a
// loader and a trainer all count steps with this struct, so that they agree.
struct StepCut {
  std::int64_t samples_per_step = 1;   // of all ranks together
  std::int64_t samples_per_batch = 1;  // likewise; the last batch of a step has what is left
  // Leaves out a last step that has fewer samples than the others.
  bool drop_last = false;

  std::int64_t batches_per_step() const { return parts(samples_per_step, samples_per_batch); }

  // How many of `num_samples` are used: the samples of an epoch, or those from the start of a step
  // on.
  std::int64_t num_used(std::int64_t num_samples) const {
    return drop_last ? num_samples / samples_per_step * samples_per_step : num_samples;
  }

  // How many steps and batches `num_used` samples make, all of which are used.
  std::int64_t num_steps(std::int64_t num_used) const { return parts(num_used, samples_per_step); }
  std::int64_t num_batches(std::int64_t num_used) const {
    return num_used / samples_per_step * batches_per_step() +
           parts(num_used % samples_per_step, samples_per_batch);
  }

  // Batches are numbered from the start of a step on, where sample 0 is.
  std::int64_t first_of(std::int64_t batch) const {
    return batch / batches_per_step() * samples_per_step +
           batch % batches_per_step() * samples_per_batch;
  }
  std::int64_t size_of(std::int64_t batch, std::int64_t num_used) const {
    const std::int64_t before = batch % batches_per_step() * samples_per_batch;
    return std::min({samples_per_batch, samples_per_step - before, num_used - first_of(batch)});
  }

 private:
  // No sum of the two: one may be as large as numbers get.
  static std::int64_t parts(std::int64_t whole, std::int64_t part) {
    return whole / part + (whole % part != 0 ? 1 : 0);
  }
};

}  // namespace lockstep::data
