#include <lockstep/data/sampling/distributed_sampler.h>

#include <algorithm>
#include <bit>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/base/philox.h>

namespace lockstep::data {

namespace {

// Four are enough to look random on halves of many bits; halves of few need more.
constexpr int rounds = 8;
// Smaller networks cannot mix well; 256 values are walked through in no time.
constexpr int least_half_bits = 4;

}  // namespace

Permutation::Permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch)
    : size_(size),
      // Others draw from the same seed.
      key_(seed ^ hash_text("data::Permutation")),
      epoch_(static_cast<std::uint64_t>(epoch)),
      half_bits_(least_half_bits) {
  constexpr std::int64_t largest = std::int64_t{1} << 62;
  if (size < 0 || size > largest)
    throw UsageError("a permutation of {} places: there can be 0 to {}", size, largest);
  const int bits = size == 0 ? 0 : std::bit_width(static_cast<std::uint64_t>(size - 1));
  while (2 * half_bits_ < bits) ++half_bits_;
}

std::uint64_t Permutation::step(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (int round = 0; round < rounds; ++round) {
    const auto words = Philox::words(key_, right | static_cast<std::uint64_t>(round) << 32, epoch_);
    const std::uint64_t mixed = (left ^ words[0]) & mask;
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

std::int64_t Permutation::operator()(std::int64_t place) const {
  LOCKSTEP_CHECK(place >= 0 && place < size_, "place {} of {}", place, size_);
  auto value = static_cast<std::uint64_t>(place);
  do value = step(value);
  while (value >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(value);
}

DistributedSampler::DistributedSampler(const SamplerOptions& options)
    : options_(options), order_(std::max<std::int64_t>(options.size, 0), options.seed, 0) {
  const auto& [size, replicas, rank, shuffle, seed, drop_last, pad_with_repeats] = options_;
  if (size < 1) throw UsageError("a sampler over {} samples: give a dataset that has some", size);
  if (replicas < 1 || rank < 0 || rank >= replicas)
    throw UsageError(
        "a sampler for rank {} of {}: ranks are 0 to num_replicas - 1, and there is at least one",
        rank, replicas);
  if (drop_last && pad_with_repeats)
    throw UsageError(
        "a sampler cannot both leave out the last samples (drop_last) and repeat others to fill "
        "them up (pad_with_repeats): choose one, or neither to use each sample once");
  const std::int64_t whole_rounds = size / replicas * replicas;
  num_positions_ = size;
  if (drop_last) num_positions_ = whole_rounds;
  if (pad_with_repeats && whole_rounds < size) num_positions_ = whole_rounds + replicas;
  if (num_positions_ == 0)
    throw UsageError(
        "with drop_last, {} samples on {} ranks leave none: give more samples, fewer ranks, or no "
        "drop_last",
        size, replicas);
}

void DistributedSampler::set_epoch(std::int64_t epoch) {
  if (epoch < 0) throw UsageError("epoch {}: they count from 0", epoch);
  epoch_ = epoch;
  order_ = Permutation(options_.size, options_.seed, epoch);
}

std::int64_t DistributedSampler::num_samples() const {
  return (num_positions_ - options_.rank + options_.num_replicas - 1) / options_.num_replicas;
}

std::int64_t DistributedSampler::index_at(std::int64_t position) const {
  if (position < 0 || position >= num_positions_)
    throw UsageError("position {} of an epoch that has {}", position, num_positions_);
  const std::int64_t place = position % options_.size;
  return options_.shuffle ? order_(place) : place;
}

std::int64_t DistributedSampler::global_batch_size(std::int64_t batch_per_rank) const {
  constexpr std::int64_t largest = std::int64_t{1} << 31;
  if (batch_per_rank < 1 || batch_per_rank > largest)
    throw UsageError("a batch of {} samples a rank: there must be 1 to {}", batch_per_rank,
                     largest);
  return batch_per_rank * options_.num_replicas;
}

std::int64_t DistributedSampler::num_global_batches(std::int64_t batch_per_rank) const {
  const std::int64_t batch = global_batch_size(batch_per_rank);
  return num_positions_ / batch + (num_positions_ % batch == 0 ? 0 : 1);
}

BatchShare DistributedSampler::share_of(std::int64_t position, std::int64_t num_samples) const {
  if (position < 0 || position >= num_positions_)
    throw UsageError("a batch from position {} on, of an epoch that has {}", position,
                     num_positions_);
  BatchShare share;
  share.global_size = std::min(num_samples, num_positions_ - position);
  for (std::int64_t row = options_.rank; row < share.global_size; row += options_.num_replicas) {
    share.indices.push_back(index_at(position + row));
    share.rows.push_back(row);
  }
  return share;
}

BatchShare DistributedSampler::share_at(std::int64_t position, std::int64_t batch_per_rank) const {
  return share_of(position, global_batch_size(batch_per_rank));
}

BatchShare DistributedSampler::share(std::int64_t number, std::int64_t batch_per_rank) const {
  const std::int64_t batches = num_global_batches(batch_per_rank);
  if (number < 0 || number >= batches)
    throw UsageError("global batch {} of an epoch that has {}", number, batches);
  return share_at(number * global_batch_size(batch_per_rank), batch_per_rank);
}

SamplerState DistributedSampler::state(std::int64_t position) const {
  return {.epoch = epoch_, .position = position, .size = options_.size, .seed = options_.seed};
}

std::int64_t DistributedSampler::load_state(const SamplerState& state) {
  if (state.size != options_.size || (options_.shuffle && state.seed != options_.seed))
    throw UsageError(
        "the saved data position is of {} samples with seed {}, but this run has {} with seed {}, "
        "which is another order: use the same data and seed, or start anew without that position",
        state.size, state.seed, options_.size, options_.seed);
  if (state.position < 0)
    throw UsageError("the saved data position is {}: the file that it is from is damaged",
                     state.position);
  set_epoch(state.epoch);
  // The end of an epoch lies elsewhere where another number of ranks drops or repeats others.
  return std::min(state.position, num_positions_);
}

}  // namespace lockstep::data
