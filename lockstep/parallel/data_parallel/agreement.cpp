#include <lockstep/parallel/data_parallel/agreement.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/call.h>
#include <lockstep/parallel/data_parallel/difference.h>

namespace lockstep::data_parallel {

namespace {

// One line a tensor.
std::vector<std::string> describe(std::span<const NamedTensor> tensors) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : tensors)
    lines.push_back(fmt::format("'{}' ({} of shape [{}]{})", name,
                                c10::toString(tensor.scalar_type()),
                                fmt::join(tensor.sizes().begin(), tensor.sizes().end(), ", "),
                                tensor.requires_grad() ? "" : ", not trained"));
  return lines;
}

// Before the first of them is sent, by its name. Empty ones are not sent.
void check_can_be_sent(std::span<const NamedTensor> tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (tensor.numel() == 0) continue;
    try {
      comm::dtype_of(tensor.scalar_type());
    } catch (const UsageError& error) {
      throw UsageError("'{}' of the model cannot be spread over ranks: {}{}", name, error.what(),
                       tensor.is_complex() ? ". Register view_as_real() of it, and call "
                                             "view_as_complex() in forward()"
                                           : "");
    }
  }
}

}  // namespace

void check_same_tensors(std::span<const NamedTensor> tensors, comm::Communicator& group) {
  const auto found = first_difference(describe(tensors), group);
  if (!found) return check_can_be_sent(tensors);
  throw UsageError(
      "the model of rank {} differs from that of rank 0, which has {} tensors where it has {}: "
      "tensor {} is {} on rank 0 and {} on rank {}. Build the same model on every rank",
      found->rank, found->num_on_first, found->num_on_rank, found->place, found->on_first,
      found->on_rank, found->rank);
}

void broadcast_from_first(std::span<const NamedTensor> tensors, comm::Communicator& group,
                          std::optional<c10::Device> device) {
  const c10::NoGradGuard no_grad;
  // One call for each kind of tensor, in the order of first appearance.
  std::vector<std::vector<at::Tensor>> kinds;
  // Of what does not lie in one piece, or lies elsewhere.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.numel() == 0) continue;
    at::Tensor data = tensor.detach();
    if (!data.is_contiguous() || data.device() != device.value_or(data.device())) {
      copies.emplace_back(data, data.to(device.value_or(data.device())).contiguous());
      data = copies.back().second;
    }
    auto kind = std::ranges::find_if(kinds, [&](const std::vector<at::Tensor>& list) {
      return list.front().scalar_type() == data.scalar_type() &&
             list.front().device() == data.device();
    });
    if (kind == kinds.end()) kind = kinds.insert(kind, std::vector<at::Tensor>());
    kind->push_back(data);
  }
  std::vector<comm::Work> works;
  for (std::vector<at::Tensor>& list : kinds) works.push_back(group.broadcast(std::move(list), 0));
  for (comm::Work& work : works) work.wait();
  for (auto& [tensor, copy] : copies) tensor.copy_(copy);
}

void refuse_together(const std::string& fault, comm::Communicator& group) {
  const at::Tensor faults = gather_numbers(fault.empty() ? 0 : 1, group);
  if (!faults.any().item<bool>()) return;
  for (const auto& lines : gather_lines({fault}, group))
    if (!lines.empty()) throw UsageError("{}", fmt::join(lines, "\n"));
}

}  // namespace lockstep::data_parallel
