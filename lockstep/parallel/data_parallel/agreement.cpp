#include <lockstep/parallel/data_parallel/agreement.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/comm/call.h>

namespace lockstep::data_parallel {

namespace {

std::string line_or_nothing(const std::vector<std::string>& lines, std::size_t index) {
  return index < lines.size() ? lines[index] : "nothing";
}

}  // namespace

at::Tensor gather_numbers(std::int64_t number, comm::Communicator& group) {
  const at::Tensor all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, at::full({1}, number, at::kLong)).wait();
  return all;
}

std::vector<std::vector<std::string>> gather_lines(const std::vector<std::string>& lines,
                                                   comm::Communicator& group) {
  const std::string text = fmt::format("{}", fmt::join(lines, "\n"));
  const at::Tensor lengths = gather_numbers(static_cast<std::int64_t>(text.size()), group);
  const at::Tensor mine = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  std::vector<at::Tensor> texts;
  for (int rank = 0; rank < group.size(); ++rank)
    texts.push_back(at::empty({lengths[rank].item<std::int64_t>()}, at::kByte));
  group.all_gather(texts, mine).wait();
  std::vector<std::vector<std::string>> all;
  for (const at::Tensor& bytes : texts) {
    std::string rest(static_cast<const char*>(bytes.data_ptr()),
                     static_cast<std::size_t>(bytes.numel()));
    std::vector<std::string>& lines_of_rank = all.emplace_back();
    for (std::size_t end = 0; !rest.empty(); rest.erase(0, end == rest.npos ? end : end + 1)) {
      end = rest.find('\n');
      lines_of_rank.push_back(rest.substr(0, end));
    }
  }
  return all;
}

std::optional<Difference> first_difference(const std::vector<std::string>& lines,
                                           comm::Communicator& group) {
  const auto hash = static_cast<std::int64_t>(hash_text(fmt::format("{}", fmt::join(lines, "\n"))));
  const at::Tensor hashes = gather_numbers(hash, group);
  if (hashes.eq(hashes[0]).all().item<bool>()) return std::nullopt;
  const auto all = gather_lines(lines, group);
  for (int rank = 1; rank < group.size(); ++rank) {
    const auto& first = all[0];
    const auto& other = all[static_cast<std::size_t>(rank)];
    if (other == first) continue;
    std::size_t place = 0;
    while (line_or_nothing(first, place) == line_or_nothing(other, place)) ++place;
    return Difference{
        rank,         place,       line_or_nothing(first, place), line_or_nothing(other, place),
        first.size(), other.size()};
  }
  LOCKSTEP_CHECK(false, "hashes differ where the lines do not");
}

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
  // Copies of what does not lie in one piece, or lies elsewhere.
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

std::optional<std::vector<std::size_t>> agree_on_order(const std::vector<std::size_t>& mine,
                                                       bool counts, comm::Communicator& group) {
  const at::Tensor teacher = at::full({1}, counts ? group.rank() : group.size(), at::kInt);
  group.all_reduce(teacher, comm::ReduceOp::min).wait();
  const int root = teacher.item<std::int32_t>();
  if (root == group.size()) return {};
  const std::vector<std::int64_t> numbers(mine.begin(), mine.end());
  const at::Tensor order = at::tensor(numbers, at::kLong);
  group.broadcast(order, root).wait();
  const std::int64_t* const first = order.data_ptr<std::int64_t>();
  return std::vector<std::size_t>(first, first + order.numel());
}

namespace {

std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return fmt::format("[{}]", fmt::join(tensor.sizes().begin(), tensor.sizes().end(), ", "));
}

}  // namespace

std::string state_fault(const std::vector<NamedTensor>& wanted,
                        const std::vector<NamedTensor>& given) {
  std::map<std::string, at::Tensor> left = by_name(given);
  if (left.size() != given.size())
    return fmt::format("it has {} tensors of {} names", given.size(), left.size());
  for (const auto& [name, tensor] : wanted) {
    const auto found = left.find(name);
    if (found == left.end()) return fmt::format("'{}' is missing", name);
    if (!found->second.defined() || found->second.sizes() != tensor.sizes())
      return fmt::format("'{}' is of shape {}, and {} is needed", name, shape_of(found->second),
                         shape_of(tensor));
    left.erase(found);
  }
  return left.empty() ? "" : fmt::format("'{}' is not part of it", left.begin()->first);
}

std::map<std::string, at::Tensor> by_name(const std::vector<NamedTensor>& state) {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : state) result[name] = tensor;
  return result;
}

}  // namespace lockstep::data_parallel
