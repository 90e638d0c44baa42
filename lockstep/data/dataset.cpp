#include <lockstep/data/dataset.h>

#include <utility>

#include <ATen/ops/empty.h>

namespace lockstep::data {

TokenDataset::TokenDataset(SequenceSet sequences) : sequences_(std::move(sequences)) {}

Batch TokenDataset::batch(std::span<const std::int64_t> indices) const {
  const std::int64_t length = sequences_.length();
  Batch batch{.input = at::empty({std::ssize(indices), length}, at::kLong),
              .target = at::empty({std::ssize(indices), length}, at::kLong)};
  auto* input = batch.input.data_ptr<std::int64_t>();
  auto* target = batch.target.data_ptr<std::int64_t>();
  for (const std::int64_t index : indices) {
    sequences_.copy_input(index, {input, static_cast<std::size_t>(length)});
    sequences_.copy_target(index, {target, static_cast<std::size_t>(length)});
    input += length;
    target += length;
  }
  return batch;
}

}  // namespace lockstep::data
