// Datasets: samples by number. torch_dataset.h wraps datasets of torch::data.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/data/tokens/sequences.h>

namespace lockstep::data {

// Samples along dim 0. The loader fills in the fields that a dataset does not know.
struct Batch {
  at::Tensor input;                     // [samples, …]
  at::Tensor target = {};               // [samples, …]; undefined where there are none
  at::Tensor target_on_host = {};       // the same, where a loader has put it on a device
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

  // The samples with these numbers, one or more, each in [0, size()), in this order, on the CPU:
  // input and target. Called from several threads at a time, and without autograd; by loaders with
  // num_workers = 0 only in the thread that asks for the batch. Random numbers from LibTorch's
  // generator come in a fixed order only then: draw them from (index, epoch) otherwise, or load
  // with num_workers = 0.
  virtual Batch batch(std::span<const std::int64_t> indices) const = 0;
};

// Samples are a SequenceSet's sequences: input and target are [samples, length] of int64, the
// target the input shifted by one. Thread-safe.
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
