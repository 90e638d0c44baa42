#include <lockstep/parallel/pipeline/boundary_shape.h>

#include <algorithm>
#include <limits>

#include <c10/core/ScalarType.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

constexpr std::int64_t kNumbersOfScalar = 3;  // of a tensor without dims
// 128 MiB of them, which is millions of tensors: who says more is not to be believed.
constexpr std::int64_t kMostNumbers = 1 << 24;

[[noreturn]] void refuse(const std::string& group, const std::string& what) {
  throw CommError({.fault = Fault::corrupted,
                   .operation = "the shapes between two stages",
                   .group = group,
                   .ranks = {0},  // who sends in a channel
                   .explanation = what});
}

class Reader {
 public:
  Reader(std::span<const std::int64_t> numbers, const std::string& group)
      : rest_(numbers), group_(group) {}

  std::int64_t left() const { return static_cast<std::int64_t>(rest_.size()); }

  // A number from 0 up to `most`.
  std::int64_t next(std::int64_t most, const char* what) {
    if (rest_.empty()) refuse(group_, fmt::format("{} is missing at the end", what));
    const std::int64_t number = rest_.front();
    rest_ = rest_.subspan(1);
    if (number < 0 || number > most)
      refuse(group_, fmt::format("{} is {}, and there can be 0 to {}", what, number, most));
    return number;
  }

 private:
  std::span<const std::int64_t> rest_;
  const std::string& group_;
};

BoundaryShape::Entry read_entry(Reader& reader, const std::string& group) {
  constexpr auto kMostTypes = static_cast<std::int64_t>(at::ScalarType::NumOptions) - 1;
  BoundaryShape::Entry entry;
  entry.type = static_cast<at::ScalarType>(reader.next(kMostTypes, "a tensor's type"));
  if (entry.type == at::ScalarType::Undefined) refuse(group, "a tensor's type is none");
  entry.wants_gradient = reader.next(1, "whether a tensor wants a gradient") != 0;
  const std::int64_t num_dims = reader.next(reader.left() - 1, "a tensor's number of dims");
  auto left = std::numeric_limits<std::int64_t>::max() /
              static_cast<std::int64_t>(c10::elementSize(entry.type));
  for (std::int64_t dim = 0; dim < num_dims; ++dim) {
    const std::int64_t size = reader.next(left, "a tensor's size");
    if (size > 0) left /= size;
    entry.sizes.push_back(size);
  }
  return entry;
}

}  // namespace

std::string BoundaryShape::text() const {
  std::vector<std::string> words;
  for (const Entry& entry : entries)
    words.push_back(fmt::format("{} [{}]{}", c10::toString(entry.type),
                                fmt::join(entry.sizes, ", "),
                                entry.wants_gradient ? " with a gradient" : ""));
  return words.empty() ? "nothing" : fmt::format("{}", fmt::join(words, ", "));
}

BoundaryShape shape_of(const std::vector<at::Tensor>& tensors) {
  BoundaryShape shape;
  for (const at::Tensor& tensor : tensors)
    shape.entries.push_back({tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()});
  return shape;
}

std::vector<std::int64_t> to_numbers(const BoundaryShape& shape) {
  std::vector<std::int64_t> numbers = {static_cast<std::int64_t>(shape.entries.size())};
  for (const BoundaryShape::Entry& entry : shape.entries) {
    numbers.push_back(static_cast<std::int64_t>(entry.type));
    numbers.push_back(entry.wants_gradient ? 1 : 0);
    numbers.push_back(static_cast<std::int64_t>(entry.sizes.size()));
    numbers.insert(numbers.end(), entry.sizes.begin(), entry.sizes.end());
  }
  return numbers;
}

std::int64_t checked_count(std::int64_t count, const std::string& group) {
  if (count < 1 || count > kMostNumbers)
    refuse(group, fmt::format("they are said to be {} numbers, and there can be 1 to {}", count,
                              kMostNumbers));
  return count;
}

BoundaryShape shape_from(std::span<const std::int64_t> numbers, const std::string& group) {
  Reader reader(numbers, group);
  const std::int64_t most = std::max<std::int64_t>(reader.left() - 1, 0) / kNumbersOfScalar;
  const std::int64_t num_tensors = reader.next(most, "the number of tensors");
  BoundaryShape shape;
  for (std::int64_t i = 0; i < num_tensors; ++i) shape.entries.push_back(read_entry(reader, group));
  if (reader.left() > 0)
    refuse(group, fmt::format("{} numbers are left behind the last of {} tensors", reader.left(),
                              num_tensors));
  return shape;
}

}  // namespace lockstep::pipeline
