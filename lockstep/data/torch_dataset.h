// Uses datasets written for torch::data without changes.
//
//   auto images = from_torch(torch::data::datasets::MNIST(folder).map(Normalize<>(0.13, 0.31)));
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ops/stack.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <lockstep/base/error.h>
#include <lockstep/data/dataset.h>

namespace lockstep::data {

// torch::data gives each of its workers a copy of the dataset; here all workers use one object.
enum class TorchCalls {
  one_at_a_time,  // right for every dataset
  concurrent,     // for datasets whose get or get_batch changes nothing: several workers may load
};

// Any dataset of torch::data that has a size and gives examples of two tensors, stacked or not.
// Ownership: holds the dataset. Threading: as `calls` says. Failure: throws the dataset's
// exceptions.
template <typename Torch>
class TorchDataset : public Dataset {
  using Example = torch::data::Example<>;
  using Given = typename Torch::BatchType;
  static constexpr bool stacked = std::is_same_v<Given, Example>;
  static_assert(stacked || std::is_same_v<Given, std::vector<Example>>,
                "from_torch takes datasets of torch::data::Example<Tensor, Tensor>");
  static_assert(std::is_same_v<typename Torch::BatchRequestType, at::ArrayRef<std::size_t>>,
                "from_torch takes datasets that are asked for samples by number, no streams");

 public:
  // UsageError if the dataset does not know its size.
  TorchDataset(Torch dataset, TorchCalls calls) : dataset_(std::move(dataset)), calls_(calls) {
    const auto size = dataset_.size();
    if (!size)
      throw UsageError(
          "this torch::data dataset does not know its size, so its samples cannot be divided among "
          "ranks: give it one that does");
    size_ = static_cast<std::int64_t>(*size);
  }

  std::int64_t size() const override { return size_; }

  Batch batch(std::span<const std::int64_t> indices) const override {
    const std::vector<std::size_t> request(indices.begin(), indices.end());
    return to_batch(ask(request), indices.size());
  }

 private:
  Given ask(const std::vector<std::size_t>& request) const {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (calls_ == TorchCalls::one_at_a_time) lock.lock();
    return dataset_.get_batch(request);
  }

  static Batch to_batch(Given given, std::size_t asked) {
    if constexpr (stacked) {
      return {.input = std::move(given.data), .target = std::move(given.target)};
    } else {
      if (given.size() != asked)
        throw UsageError("the torch::data dataset was asked for {} samples and gave {}", asked,
                         given.size());
      std::vector<at::Tensor> inputs;
      std::vector<at::Tensor> targets;
      for (Example& example : given) {
        inputs.push_back(std::move(example.data));
        targets.push_back(std::move(example.target));
      }
      return {.input = at::stack(inputs), .target = at::stack(targets)};
    }
  }

  mutable Torch dataset_;  // get_batch is not const
  mutable std::mutex mutex_;
  TorchCalls calls_;
  std::int64_t size_ = 0;
};

template <typename Torch>
std::shared_ptr<const Dataset> from_torch(Torch dataset,
                                          TorchCalls calls = TorchCalls::one_at_a_time) {
  return std::make_shared<TorchDataset<Torch>>(std::move(dataset), calls);
}

// Whatever a program has: a data set of torch::data, or one of ours, shared.
template <typename Data>
std::shared_ptr<const Dataset> as_dataset(Data data) {
  if constexpr (std::is_convertible_v<Data, std::shared_ptr<const Dataset>>)
    return data;
  else
    return from_torch(std::move(data));
}

}  // namespace lockstep::data
