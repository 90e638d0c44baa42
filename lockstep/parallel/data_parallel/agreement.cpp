#include <lockstep/parallel/data_parallel/agreement.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>

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

at::Tensor gather_numbers(std::int64_t number, comm::Communicator& group, c10::Device device) {
  const at::Tensor mine = at::full({1}, number, at::kLong).to(device);
  const at::Tensor all = at::empty({group.size()}, mine.options());
  group.all_gather(all, mine).wait();
  return all.cpu();
}

// Every rank's lines, in rank order.
std::vector<std::vector<std::string>> gather_lines(const std::vector<std::string>& lines,
                                                   comm::Communicator& group, c10::Device device) {
  const std::string text = fmt::format("{}", fmt::join(lines, "\n"));
  const at::Tensor lengths = gather_numbers(static_cast<std::int64_t>(text.size()), group, device);
  const at::Tensor mine = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  std::vector<at::Tensor> texts;
  for (int rank = 0; rank < group.size(); ++rank)
    texts.push_back(
        at::empty({lengths[rank].item<std::int64_t>()}, at::device(device).dtype(at::kByte)));
  group.all_gather(texts, mine.to(device)).wait();
  std::vector<std::vector<std::string>> all;
  for (const at::Tensor& bytes : texts) {
    const at::Tensor host = bytes.cpu();
    std::string rest(static_cast<const char*>(host.data_ptr()),
                     static_cast<std::size_t>(host.numel()));
    std::vector<std::string>& lines_of_rank = all.emplace_back();
    for (std::size_t end = 0; !rest.empty(); rest.erase(0, end == rest.npos ? end : end + 1)) {
      end = rest.find('\n');
      lines_of_rank.push_back(rest.substr(0, end));
    }
  }
  return all;
}

std::string line_or_nothing(const std::vector<std::string>& lines, std::size_t index) {
  return index < lines.size() ? lines[index] : "nothing";
}

}  // namespace

void check_same_tensors(std::span<const NamedTensor> tensors, comm::Communicator& group,
                        c10::Device device) {
  const std::vector<std::string> lines = describe(tensors);
  const auto hash = static_cast<std::int64_t>(hash_text(fmt::format("{}", fmt::join(lines, "\n"))));
  const at::Tensor hashes = gather_numbers(hash, group, device);
  if (hashes.eq(hashes[0]).all().item<bool>()) return;

  const auto all = gather_lines(lines, group, device);
  for (int rank = 1; rank < group.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    std::size_t index = 0;
    while (line_or_nothing(all[0], index) == line_or_nothing(all[rank], index)) ++index;
    throw UsageError(
        "the model of rank {} differs from that of rank 0, which has {} tensors where it has {}: "
        "tensor {} is {} on rank 0 and {} on rank {}. Build the same model on every rank",
        rank, all[0].size(), all[rank].size(), index, line_or_nothing(all[0], index),
        line_or_nothing(all[rank], index), rank);
  }
  LOCKSTEP_CHECK(false, "hashes differ where the lines do not");
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

void refuse_together(const std::string& fault, comm::Communicator& group, c10::Device device) {
  const at::Tensor faults = gather_numbers(fault.empty() ? 0 : 1, group, device);
  if (!faults.any().item<bool>()) return;
  for (const auto& lines : gather_lines({fault}, group, device))
    if (!lines.empty()) throw UsageError("{}", fmt::join(lines, "\n"));
}

}  // namespace lockstep::data_parallel
