// Loads batches while the model works on earlier ones.
//
//   DataLoader loader(dataset, DistributedSampler({.size = dataset->size(), …}),
//                     {.batch_size = 8});
//   for (std::int64_t epoch = 0; epoch < 10; ++epoch) {
//     loader.set_epoch(epoch);
//     while (auto batch = loader.next()) …
//   }
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Device.h>

#include <lockstep/base/deadline.h>
#include <lockstep/data/dataset.h>
#include <lockstep/data/sampling/distributed_sampler.h>
#include <lockstep/data/sampling/prefetcher.h>

namespace lockstep::data {

struct DataLoaderOptions {
  std::int64_t batch_size = 1;  // samples of each rank's batch, at most
  int num_workers = 1;          // threads that load; 0 loads in next()
  int prefetch = 2;             // batches that each worker loads ahead
  // Samples of all ranks in one step. A step has as many full batches as fit into it, and one batch
  // with the rest. 0: one full batch.
  std::int64_t samples_per_step = 0;
  // Leaves out the last step if it has fewer samples than the others.
  bool drop_last = false;
  // Puts batches into memory from which a GPU copies by itself. Needs a GPU.
  bool pin_memory = false;
  // The device of the batches; the CPU if not given. For a GPU they are pinned, and the copy runs
  // asynchronously on the current stream.
  std::optional<c10::Device> device = {};
};

// The batches of one rank, in the sampler's order. All ranks get equally many: a rank without a
// sample in the last global batch gets a batch of size 0.
//
// Ownership: shares the dataset; owns its threads, which run from the first next() of an epoch to
// its last batch. Threading: for one thread. Failure: an exception of the dataset is thrown by the
// next() that would have returned the batch; the position stays, so another next() tries again. The
// destructor waits only for the batches that are being loaded.
class DataLoader {
 public:
  // UsageError if options, dataset and sampler do not fit together.
  DataLoader(std::shared_ptr<const Dataset> dataset, DistributedSampler sampler,
             const DataLoaderOptions& options = {});
  // Its threads refer to it, so it cannot move.
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // Changes the sizes from the next step on. Call it between two steps.
  void set_step(std::int64_t batch_size, std::int64_t samples_per_step);

  // Begins an epoch; without a call, epoch 0 is read.
  void set_epoch(std::int64_t epoch);

  // The next batch; nothing at the end of the epoch.
  std::optional<Batch> next();

  // The number of batches of a whole epoch, the same on every rank.
  std::int64_t num_batches() const;
  // The number of batches that next() has still to give, the same on every rank.
  std::int64_t batches_left() const { return cut_.num_batches(end_ - start_) - num_given_; }
  // Numbers of steps. A step that has begun counts as one.
  std::int64_t num_steps() const { return cut_.num_steps(cut_.num_used(sampler_.num_positions())); }
  std::int64_t steps_left() const {
    return cut_.num_steps(end_ - start_) - num_given_ / cut_.batches_per_step();
  }
  const DistributedSampler& sampler() const { return sampler_; }

  // The position after the batches that next() has returned, whatever was loaded ahead. A loader
  // that loads the state returns exactly the batches that were still to come, also on another
  // number of ranks with another batch size. Take it between steps, because steps are counted from
  // there.
  SamplerState state() const {
    return sampler_.state(batches_left() == 0 ? end_ : start_ + cut_.first_of(num_given_));
  }
  void load_state(const SamplerState& state);

  // The share of the last steps' time, from one next() to the next, that was spent waiting in
  // next(); 0 before the second step. If the share is large, that is logged once.
  double starvation() const { return starvation_.share(); }

 private:
  void start_at(std::int64_t position);
  std::optional<Batch> take();
  bool device_is_idle() const;
  void put_on_device(Batch& batch) const;
  Batch load(std::int64_t number) const;
  Batch load_samples(const BatchShare& share) const;
  void note_step(Clock::duration waited);

  std::shared_ptr<const Dataset> dataset_;
  DistributedSampler sampler_;
  DataLoaderOptions options_;
  std::optional<c10::Device> pinned_for_;
  StepCut cut_;
  std::int64_t start_ = 0;      // start of the epoch, or where loading went on
  std::int64_t end_ = 0;        // where this epoch's last batch ends
  std::int64_t num_given_ = 0;  // batches since the start
  StarvationMeter starvation_;
  std::optional<Clock::time_point> last_given_;    // within this epoch
  std::unique_ptr<Prefetcher<Batch>> prefetcher_;  // last: its threads use the other members
};

}  // namespace lockstep::data
