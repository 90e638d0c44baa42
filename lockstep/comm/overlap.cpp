#include <lockstep/comm/overlap.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include <lockstep/base/error.h>

namespace lockstep::comm {

namespace {

// Where a contiguous tensor lies. Addresses compare across storages where they are addresses; on
// other devices (MPS) they are handles, and only tensors of one storage can overlap.
struct Extent {
  const void* space = nullptr;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::size_t index = 0;  // in the caller's list

  bool empty() const { return begin == end; }
  bool overlaps(const Extent& other) const {
    return space == other.space && begin < other.end && other.begin < end;
  }
  bool same_as(const Extent& other) const {
    return space == other.space && begin == other.begin && end == other.end;
  }
};

Extent extent_of(const at::Tensor& tensor, std::size_t index = 0) {
  const auto bytes = static_cast<std::uintptr_t>(tensor.numel()) * tensor.element_size();
  if (tensor.device().is_cpu() || tensor.device().is_cuda()) {
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
    return {nullptr, begin, begin + bytes, index};
  }
  const auto begin = static_cast<std::uintptr_t>(tensor.storage_offset()) * tensor.element_size();
  return {tensor.storage().unsafeGetStorageImpl(), begin, begin + bytes, index};
}

struct Words {
  const char* output;
  const char* input;
};

Words words_for(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
    case Operation::broadcast: return {"tensor", "tensor"};
    case Operation::exchange: return {"receive", "send"};
    default: return {"output", "input"};
  }
}

[[noreturn]] void fail(Operation operation, const std::string& one, const std::string& other) {
  throw UsageError("{}: {} and {} overlap in memory, and the result would depend on which is "
                   "written first: give each memory of its own, or pass a clone()",
                   name(operation), one, other);
}

}  // namespace

void check_overlap(Operation operation, const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs, std::optional<SamePlace> same) {
  if (outputs.size() == 1 && inputs.empty()) return;
  const Words words = words_for(operation);
  std::vector<Extent> written;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (const Extent extent = extent_of(outputs[i], i); !extent.empty()) written.push_back(extent);
  std::sort(written.begin(), written.end(), [](const Extent& a, const Extent& b) {
    return std::tie(a.space, a.begin) < std::tie(b.space, b.begin);
  });
  for (std::size_t i = 1; i < written.size(); ++i) {
    const auto [first, second] = std::minmax(written[i - 1].index, written[i].index);
    // Weights that a model uses twice are broadcast twice, to the same effect.
    if (operation == Operation::broadcast && written[i - 1].same_as(written[i])) continue;
    if (written[i - 1].overlaps(written[i]))
      fail(operation, fmt::format("{} {}", words.output, first),
           fmt::format("{} {}", words.output, second));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Extent read = extent_of(inputs[i], i);
    // Outputs do not overlap each other: the first that ends behind the input's begin is the only
    // one to look at.
    const auto found =
        std::partition_point(written.begin(), written.end(), [&](const Extent& extent) {
          return std::tie(extent.space, extent.end) <= std::tie(read.space, read.begin);
        });
    if (read.empty() || found == written.end() || !found->overlaps(read)) continue;
    if (same && same->input == i && same->output == found->index && found->same_as(read)) continue;
    fail(operation, fmt::format("{} {}", words.output, found->index),
         fmt::format("{} {}", words.input, i));
  }
}

void check_part(Operation operation, const at::Tensor& whole, const at::Tensor& part, int rank) {
  const Extent all = extent_of(whole);
  const Extent one = extent_of(part);
  if (one.empty() || !one.overlaps(all)) return;
  if (one.begin == all.begin + static_cast<std::uintptr_t>(rank) * (one.end - one.begin)) return;
  throw UsageError("{}: input and output overlap in memory, but not where rank {}'s part is ({} "
                   "elements from {} on): pass exactly that part, or memory of its own",
                   name(operation), rank, part.numel(), rank * part.numel());
}

}  // namespace lockstep::comm
