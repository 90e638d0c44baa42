// Samples that are changed at random, in another way in each epoch:
//
//   const auto images = data::augmented(MNIST(folder), [](const at::Tensor& image,
//                                                         const at::Generator& random) {
//     return torch::rand({1}, random).item<float>() < 0.5 ? image.flip(-1) : image;
//   });
//
// A sample's change depends on the seed, the epoch and the sample's number alone: it is the same on
// any number of ranks, with any number of workers, and in a run that goes on from a checkpoint.
// Two augmentations on top of each other need different seeds: with one seed they draw the same
// numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <lockstep/data/dataset.h>
#include <lockstep/data/torch_dataset.h>

namespace lockstep::data {

// One sample, without the dimension along which a batch has several.
struct Sample {
  at::Tensor input;
  at::Tensor target = {};  // undefined without targets
};

// Ownership: shares the dataset, holds the function. Threading: calls the function from as many
// threads as a loader has workers. Failure: UsageError if the function returns samples of different
// shapes, or none; throws the exceptions of the dataset and of the function.
class AugmentedDataset : public Dataset {
 public:
  // Draws its random numbers from `random`, and returns new tensors: those that it is given may be
  // the data set's own memory.
  using Change = std::function<Sample(Sample sample, const at::Generator& random)>;

  AugmentedDataset(std::shared_ptr<const Dataset> dataset, Change change, std::uint64_t seed);

  std::int64_t size() const override { return dataset_->size(); }
  // As they are changed in epoch 0.
  Batch batch(std::span<const std::int64_t> indices) const override {
    return batch_of_epoch(indices, 0);
  }
  Batch batch_of_epoch(std::span<const std::int64_t> indices, std::int64_t epoch) const override;

 private:
  std::shared_ptr<const Dataset> dataset_;
  Change change_;
  std::uint64_t seed_;
};

// Data: a dataset of torch::data, or a shared_ptr<const Dataset>. Change: takes an input, or a
// Sample where the target changes with it, and a generator; returns the new one.
template <typename Data, typename Change>
std::shared_ptr<const Dataset> augmented(Data data, Change change, std::uint64_t seed = 0) {
  const auto dataset = as_dataset(std::move(data));
  if constexpr (std::is_invocable_r_v<Sample, const Change&, Sample, const at::Generator&>) {
    return std::make_shared<AugmentedDataset>(dataset, std::move(change), seed);
  } else {
    static_assert(
        std::is_invocable_r_v<at::Tensor, const Change&, const at::Tensor&, const at::Generator&>,
        "a change takes an at::Tensor or a Sample, and an at::Generator, and returns the same");
    return std::make_shared<AugmentedDataset>(
        dataset,
        [change = std::move(change)](Sample sample, const at::Generator& random) {
          sample.input = change(sample.input, random);
          return sample;
        },
        seed);
  }
}

}  // namespace lockstep::data
