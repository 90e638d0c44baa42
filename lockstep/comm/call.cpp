#include <lockstep/comm/call.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include <lockstep/base/error.h>

namespace lockstep::comm {

void check_divisor(const at::Tensor& divisor, Operation operation, ReduceOp op,
                   c10::Device device) {
  if (op != ReduceOp::mean)
    throw UsageError("{}: a divisor is for means, this is a {}", name(operation), name(op));
  if (!divisor.device().is_cpu() || divisor.scalar_type() != at::kDouble || divisor.numel() != 1)
    throw UsageError("{}: a divisor is one float64 on the CPU, this one is {} {} on {}",
                     name(operation), divisor.numel(), c10::toString(divisor.scalar_type()),
                     divisor.device().str());
  if (!device.is_cpu())
    throw UsageError("{}: a divisor is for tensors on the CPU, these are on {}: take the sum and "
                     "divide it",
                     name(operation), device.str());
}

double divisor_of(ReduceOp op, const at::Tensor& divisor, int num_ranks) {
  if (op != ReduceOp::mean) return 1;
  if (!divisor.defined()) return num_ranks;
  const double number = *static_cast<const double*>(divisor.data_ptr());
  return number == 0 ? 1 : number;
}

DType dtype_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float: return DType::float32;
    case c10::ScalarType::Double: return DType::float64;
    case c10::ScalarType::Half: return DType::float16;
    case c10::ScalarType::BFloat16: return DType::bfloat16;
    case c10::ScalarType::Int: return DType::int32;
    case c10::ScalarType::Long: return DType::int64;
    case c10::ScalarType::Byte: return DType::uint8;
    case c10::ScalarType::Bool: return DType::boolean;
    default:
      throw UsageError("tensors of dtype {} cannot be communicated: use float32, float64, float16, "
                       "bfloat16, int32, int64, uint8 or bool (tensor.view(torch::kByte) sends any "
                       "type's bytes)",
                       c10::toString(type));
  }
}

c10::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return c10::ScalarType::Float;
    case DType::float64: return c10::ScalarType::Double;
    case DType::float16: return c10::ScalarType::Half;
    case DType::bfloat16: return c10::ScalarType::BFloat16;
    case DType::int32: return c10::ScalarType::Int;
    case DType::int64: return c10::ScalarType::Long;
    case DType::uint8: return c10::ScalarType::Byte;
    case DType::boolean: return c10::ScalarType::Bool;
  }
  LOCKSTEP_CHECK(false, "dtype {}", static_cast<int>(dtype));
  return c10::ScalarType::Undefined;
}

namespace {

// The memory of a contiguous tensor. Where addresses are real, they compare across storages; on
// other devices (MPS) they are handles, and only tensors of one storage can overlap.
struct Extent {
  const void* space = nullptr;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::size_t index = 0;  // position in the caller's list

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
    // Weights that a model uses twice may be broadcast twice: both times write the same values.
    if (operation == Operation::broadcast && written[i - 1].same_as(written[i])) continue;
    if (written[i - 1].overlaps(written[i]))
      fail(operation, fmt::format("{} {}", words.output, first),
           fmt::format("{} {}", words.output, second));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Extent read = extent_of(inputs[i], i);
    // Outputs do not overlap each other, so it is enough to look at the first one that ends behind
    // the input's begin.
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
