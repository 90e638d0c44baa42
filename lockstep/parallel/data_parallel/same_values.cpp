#include <lockstep/parallel/data_parallel/same_values.h>

#include <algorithm>
#include <map>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/parallel/data_parallel/agreement.h>

namespace lockstep::data_parallel {

namespace {

// Smaller tensors of a device are put together before they are summed: a kernel for each would take
// longer than the sums.
constexpr std::int64_t kSmallElements = 1 << 16;
constexpr std::int64_t kTogether = 1 << 22;

at::ScalarType integer_of(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1: return at::kChar;
    case 2: return at::kShort;
    case 4: return at::kInt;
    default: return at::kLong;
  }
}

// A tensor's bits as numbers.
at::Tensor as_integers(const at::Tensor& tensor) {
  return tensor.contiguous().view({-1}).view(integer_of(tensor));
}

std::uint64_t hash_on_host(const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous();
  return hash_memory(std::span(static_cast<const std::byte*>(values.data_ptr()), values.nbytes()));
}

// One number for each tensor: [tensors] of int64, on the host.
at::Tensor digest_each(std::span<const NamedTensor> tensors) {
  std::vector<at::Tensor> digests;
  for (const auto& [name, tensor] : tensors)
    digests.push_back(
        tensor.is_cpu()
            ? at::scalar_tensor(static_cast<std::int64_t>(hash_on_host(tensor)), at::kLong)
            : as_integers(tensor.detach()).sum(at::kLong).cpu());
  return at::stack(digests);
}

// One number for all of them.
std::int64_t digest_all(std::span<const NamedTensor> tensors) {
  std::uint64_t digest = 0;
  std::vector<at::Tensor> sums;     // of the bits of tensors on other devices
  std::vector<at::Tensor> waiting;  // of one kind
  std::int64_t num_waiting = 0;
  const auto sum_waiting = [&] {
    if (!waiting.empty()) sums.push_back(at::cat(waiting).sum(at::kLong));
    waiting.clear();
    num_waiting = 0;
  };
  for (const auto& [name, tensor] : tensors) {
    if (tensor.is_cpu()) {
      digest = digest * 0x9e3779b97f4a7c15ull + hash_on_host(tensor);
      continue;
    }
    at::Tensor bits = as_integers(tensor.detach());
    if (bits.numel() > kSmallElements) {
      sums.push_back(bits.sum(at::kLong));
      continue;
    }
    const bool other_kind =
        !waiting.empty() && (waiting.front().scalar_type() != bits.scalar_type() ||
                             waiting.front().device() != bits.device());
    if (other_kind || num_waiting + bits.numel() > kTogether) sum_waiting();
    num_waiting += bits.numel();
    waiting.push_back(std::move(bits));
  }
  sum_waiting();
  if (sums.empty()) return static_cast<std::int64_t>(digest);
  // Read from the device once.
  const at::Tensor read = at::stack(sums).cpu();
  for (std::int64_t i = 0; i < read.numel(); ++i)
    digest = digest * 0x9e3779b97f4a7c15ull +
             static_cast<std::uint64_t>(read.data_ptr<std::int64_t>()[i]);
  return static_cast<std::int64_t>(digest);
}

// The members of a group, by the ranks that the job knows them by, that have another number than
// most of them; of two halves the second.
std::vector<int> odd_ones(const at::Tensor& numbers, const std::vector<int>& global_ranks) {
  std::map<std::int64_t, int> counts;
  const std::int64_t* const each = numbers.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i) ++counts[each[i]];
  std::int64_t most = each[0];
  for (const auto& [number, count] : counts)
    if (count > counts[most]) most = number;
  std::vector<int> odd;
  for (std::int64_t i = 0; i < numbers.numel(); ++i)
    if (each[i] != most) odd.push_back(global_ranks[static_cast<std::size_t>(i)]);
  return odd;
}

}  // namespace

Compared parameters() {
  return {.things = "parameters",
          .advice =
              "Something changed it on some ranks alone (load the same file and write the same "
              "values on every rank, and let every rank take every step), or a rank's memory is "
              "damaged: start the ranks anew from a checkpoint. Where ranks differ on purpose (a "
              "comm_hook that exchanges only now and then, processors that round differently), "
              "consistency_check_interval = 0 turns this check off"};
}

void check_same_values(std::span<const NamedTensor> tensors, comm::Communicator& group,
                       const Compared& what) {
  if (tensors.empty() || group.size() == 1) return;
  const c10::NoGradGuard no_grad;
  const at::Tensor of_all = gather_numbers(digest_all(tensors), group);
  if (of_all.eq(of_all[0]).all().item<bool>()) return;
  const at::Tensor mine = digest_each(tensors);
  const auto num_tensors = static_cast<std::int64_t>(tensors.size());
  at::Tensor each = at::empty({group.size(), num_tensors}, mine.options());
  group.all_gather(each, mine).wait();
  const at::Tensor differs = each.ne(each[0]).any(0);
  LOCKSTEP_CHECK(differs.any().item<bool>(), "digests differ where no tensor's does");
  const auto first = differs.nonzero()[0].item<std::int64_t>();
  const std::vector<int> odd = odd_ones(each.select(1, first).contiguous(), group.global_ranks());
  throw UsageError(
      "{} of {} {} are not the same on all ranks that should hold the same: '{}' has other values "
      "on rank{} {} than on the other {}. {}",
      differs.sum().item<std::int64_t>(), num_tensors, what.things,
      tensors[static_cast<std::size_t>(first)].name, odd.size() == 1 ? "" : "s",
      fmt::join(odd, ", "), group.size() - static_cast<int>(odd.size()), what.advice);
}

}  // namespace lockstep::data_parallel
