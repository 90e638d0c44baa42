#include <lockstep/data/augmented_dataset.h>

#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/stack.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/philox.h>

namespace lockstep::data {

namespace {

at::Tensor together(const std::vector<at::Tensor>& parts, const char* what) {
  for (const at::Tensor& part : parts) {
    if (!part.defined())
      throw UsageError("the augmentation returned no {} for a sample that has one", what);
    if (part.sizes() != parts.front().sizes())
      throw UsageError("the augmentation made {}s of shapes [{}] and [{}] for one batch: they must "
                       "be the same",
                       what, fmt::join(parts.front().sizes(), ", "), fmt::join(part.sizes(), ", "));
  }
  return at::stack(parts);
}

}  // namespace

AugmentedDataset::AugmentedDataset(std::shared_ptr<const Dataset> dataset, Change change,
                                   std::uint64_t seed)
    : dataset_(std::move(dataset)), change_(std::move(change)), seed_(seed) {
  if (dataset_ == nullptr) throw UsageError("augmented() was given a null pointer as the dataset");
}

Batch AugmentedDataset::batch_of_epoch(std::span<const std::int64_t> indices,
                                       std::int64_t epoch) const {
  Batch batch = dataset_->batch_of_epoch(indices, epoch);
  std::vector<at::Tensor> inputs, targets;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    const Philox::Words words = Philox::words(seed_, static_cast<std::uint64_t>(indices[i]),
                                              static_cast<std::uint64_t>(epoch));
    const at::Generator random =
        at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{words[0]} << 32 | words[1]);
    Sample sample{.input = batch.input[row]};
    if (batch.target.defined()) sample.target = batch.target[row];
    sample = change_(std::move(sample), random);
    inputs.push_back(std::move(sample.input));
    if (batch.target.defined()) targets.push_back(std::move(sample.target));
  }
  batch.input = together(inputs, "input");
  if (batch.target.defined()) batch.target = together(targets, "target");
  return batch;
}

}  // namespace lockstep::data
