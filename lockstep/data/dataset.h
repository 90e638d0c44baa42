// Datasets: samples by number. torch_dataset.h wraps datasets of torch::data, augmented_dataset.h
// changes samples at random.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/data/tokens/sequences.h>

namespace lockstep::data {

// Samples along dim 0. The loader fills in the fields that a dataset does not know.
struct Batch {
  at::Tensor input;                // [samples, …]
  at::Tensor target = {};          // [samples, …]; undefined without targets
  at::Tensor target_on_host = {};  // the same on the host, after a loader has moved it to a device
  std::vector<std::int64_t> rows = {};  // the place of each sample in the global batch
  std::int64_t global_size = 0;         // samples of all ranks together

  std::int64_t size() const { return input.defined() ? input.size(0) : 0; }
};

// A dataset with random access.
class Dataset {
 public:
  virtual ~Dataset() = default;

  // Fixed for the dataset's life.
  virtual std::int64_t size() const = 0;

  // Returns the samples with these numbers, one or more, each in [0, size()), in this order, on the
  // CPU: input and target. Called from several threads at a time, without autograd; a loader with
  // num_workers = 0 calls it only in the thread that asks for the batch. Only then do random
  // numbers from LibTorch's generator come in a fixed order: a dataset that changes its samples at
  // random, such as augmented_dataset.h's, computes them from (index, epoch).
  virtual Batch batch(std::span<const std::int64_t> indices) const = 0;

  // The same, as a loader asks for them in an epoch.
  virtual Batch batch_of_epoch(std::span<const std::int64_t> indices,
                               std::int64_t /*epoch*/) const {
    return batch(indices);
  }
};

// A SequenceSet's sequences as samples: input and target are [samples, length] of int64, and the
// target is the input shifted by one. Thread-safe.
class TokenDataset : public Dataset {
 public:
  explicit TokenDataset(SequenceSet sequences);

  const SequenceSet& sequences() const { return sequences_; }
  std::int64_t size() const override { return sequences_.size(); }
  Batch batch(std::span<const std::int64_t> indices) const override;

 private:
  SequenceSet sequences_;
};

}  // namespace lockstep::data
