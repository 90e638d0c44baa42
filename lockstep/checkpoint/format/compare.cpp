#include <lockstep/checkpoint/format/compare.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include <lockstep/base/float16.h>

namespace lockstep::checkpoint {

namespace {

template <typename Value>
Value value_at(const std::byte* bytes) {
  Value value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// Nothing for types that are no floating-point numbers.
std::optional<double> number_at(DType dtype, const std::byte* bytes) {
  switch (dtype) {
    case DType::f64: return value_at<double>(bytes);
    case DType::f32: return value_at<float>(bytes);
    case DType::bf16: return to_float(value_at<BFloat16>(bytes));
    case DType::f16: return to_float(value_at<Float16>(bytes));
    default: return std::nullopt;
  }
}

// Adds what one stretch of both differs in.
void add_differences(DType dtype, const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                     TensorDifference& difference, bool& no_number) {
  const std::size_t size = bits_of(dtype) / 8;
  for (std::size_t at = 0; at < a.size(); at += size) {
    if (std::memcmp(a.data() + at, b.data() + at, size) == 0) continue;
    ++difference.differing;
    const auto first = number_at(dtype, a.data() + at), second = number_at(dtype, b.data() + at);
    if (!first) continue;
    const double distance = std::abs(*first - *second);
    no_number = no_number || std::isnan(distance);
    difference.largest = std::max(difference.largest.value_or(0), distance);
  }
}

std::optional<TensorDifference> difference_of(CheckpointReader& first, CheckpointReader& second,
                                              const std::string& name) {
  const TensorRecord* const a = first.find(name);
  const TensorRecord* const b = second.find(name);
  using Kind = TensorDifference::Kind;
  if (a == nullptr) return TensorDifference{.name = name, .kind = Kind::only_in_second};
  if (b == nullptr) return TensorDifference{.name = name, .kind = Kind::only_in_first};
  if (a->dtype != b->dtype || a->shape != b->shape)
    return TensorDifference{.name = name, .kind = Kind::another_form};
  const auto whole = mesh::Placement::full(a->shape);
  TensorDifference difference{
      .name = name, .kind = Kind::other_values, .elements = whole.elements()};
  const auto stretch =
      static_cast<std::int64_t>(kHashedBytes / std::max<std::uint64_t>(1, bits_of(a->dtype) / 8));
  bool no_number = false;
  for (std::int64_t begin = 0; begin < whole.elements(); begin += stretch) {
    const auto part =
        whole.cut_flat(mesh::Interval{begin, std::min(begin + stretch, whole.elements())});
    std::vector<std::byte> mine(piece_bytes(a->dtype, part)), other(mine.size());
    first.read(name, part, mine);
    second.read(name, part, other);
    add_differences(a->dtype, mine, other, difference, no_number);
  }
  if (difference.differing == 0) return std::nullopt;
  if (no_number) difference.largest.reset();
  return difference;
}

}  // namespace

void compare(CheckpointReader& first, CheckpointReader& second,
             const std::function<void(const TensorDifference&)>& visit) {
  std::set<std::string> names;
  for (const CheckpointReader* reader : {&first, &second})
    for (const auto& [name, record] : reader->manifest().tensors) names.insert(name);
  for (const std::string& name : names)
    if (const auto difference = difference_of(first, second, name)) visit(*difference);
}

}  // namespace lockstep::checkpoint
