#include "held_parts.h"

#include <ATen/ATen.h>

namespace lockstep::peer_copies {

namespace {

using mesh::Placement;

// Values are small enough for every type to hold them exactly.
at::Tensor values_at(const mesh::HeldTensor& tensor, std::int64_t step) {
  const Placement& placement = tensor.placement;
  at::Tensor index = at::arange(placement.range().begin, placement.range().end);
  if (!placement.has_whole_box_of_tensor())
    for (std::int64_t i = 0; i < placement.elements(); ++i) index[i] = placement.logical_index(i);
  const at::Tensor wanted =
      (index * 31 + step * 57 + static_cast<std::int64_t>(tensor.name.size())).remainder(113);
  return wanted.to(tensor.values.scalar_type()).view(tensor.values.sizes());
}

mesh::HeldTensor held(const std::string& name, std::vector<std::int64_t> shape,
                      const Placement& placement, at::ScalarType type) {
  return {name, at::zeros({placement.elements()}, type), std::move(shape), placement};
}

}  // namespace

std::vector<mesh::HeldTensor> parts_of(int rank, int num_ranks, std::int64_t step, Values values,
                                       std::int64_t large_elements) {
  std::vector<mesh::HeldTensor> all = {
      held("model/all", {40, 7}, Placement::full({40, 7}), at::kFloat),
      held("model/columns", {9, 10}, Placement::full({9, 10}).cut_dim(1, rank, num_ranks),
           at::kBFloat16),
      // Three matrices in one tensor, each cut by itself.
      held("model/three", {15, 8}, Placement::full({3, 5, 8}).cut_dim(1, rank, num_ranks),
           at::kFloat),
      held("optimizer/flat", {101, 3}, Placement::full({101, 3}).cut_flat(rank, num_ranks),
           at::kDouble),
      held("optimizer/steps", {}, Placement::full({}), at::kLong),
      held("optimizer/empty", {0, 3}, Placement::full({0, 3}), at::kFloat),
      held("own/rank" + std::to_string(rank), {17}, Placement::full({17}), at::kByte)};
  if (large_elements > 0)
    all.push_back(held("model/large", {large_elements},
                       Placement::full({large_elements}).cut_flat(rank, num_ranks), at::kFloat));
  // These strides are not dense.
  all.front().values = at::zeros({7, 40}).t();
  if (values == Values::of_step)
    for (mesh::HeldTensor& tensor : all) tensor.values.copy_(values_at(tensor, step));
  return all;
}

CheckpointContents contents_of(int rank, int num_ranks, std::int64_t step,
                               std::int64_t large_elements) {
  return {.tensors = parts_of(rank, num_ranks, step, Values::of_step, large_elements),
          .state = {.step = step,
                    .data = {.epoch = 1, .position = step * 8, .size = 1000},
                    .seed = 7,
                    .samples_seen = step * 8,
                    .last_loss = 1.0 / static_cast<double>(step + 3),
                    .values = {{"updates", static_cast<double>(step)}},
                    .config = "{}"}};
}

void expect_values(ranks::Cells& cells, const std::vector<mesh::HeldTensor>& tensors,
                   std::int64_t step) {
  for (const mesh::HeldTensor& tensor : tensors)
    cells.expect_same(tensor.values, values_at(tensor, step), tensor.name);
}

void expect_untouched(ranks::Cells& cells, const std::vector<mesh::HeldTensor>& tensors) {
  for (const mesh::HeldTensor& tensor : tensors)
    cells.expect_same(tensor.values, at::zeros_like(tensor.values), tensor.name);
}

}  // namespace lockstep::peer_copies
