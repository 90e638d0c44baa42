// Datasets with special behaviour for the tests.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <lockstep/data/data_loader.h>

namespace lockstep::data {

// Sample k is input [k, 2k] and target k; `before` is called for each batch.
class Numbers : public Dataset {
 public:
  using Before = std::function<void(std::span<const std::int64_t>)>;

  explicit Numbers(std::int64_t size, Before before = {})
      : size_(size), before_(std::move(before)) {}

  std::int64_t size() const override { return size_; }

  Batch batch(std::span<const std::int64_t> indices) const override {
    if (before_) before_(indices);
    const at::Tensor target = at::zeros({std::ssize(indices)}, at::kLong);
    for (std::size_t i = 0; i < indices.size(); ++i)
      target.data_ptr<std::int64_t>()[i] = indices[i];
    return {.input = target.unsqueeze(1).mul(at::tensor({1, 2}, at::kLong)), .target = target};
  }

 private:
  std::int64_t size_;
  Before before_;
};

inline std::vector<std::int64_t> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  const auto* const first = flat.data_ptr<std::int64_t>();
  return {first, first + flat.numel()};
}

// The samples of the remaining batches, one list for each batch.
inline std::vector<std::vector<std::int64_t>> remaining(DataLoader& loader) {
  std::vector<std::vector<std::int64_t>> batches;
  while (const auto batch = loader.next()) batches.push_back(values(batch->target));
  return batches;
}

}  // namespace lockstep::data
