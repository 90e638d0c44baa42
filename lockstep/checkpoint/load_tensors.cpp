#include <algorithm>
#include <cstring>
#include <set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/scalar_type.h>
#include <lockstep/checkpoint/tensors.h>

namespace lockstep::checkpoint {

namespace {

struct Assignment {
  const StoredTensor* stored = nullptr;
  const NamedTensor* target = nullptr;
  bool transposed = false;
};

// Pairs every target with what the file has for it.
class Matcher {
 public:
  Matcher(const SafetensorsFolder& source, const LoadOptions& options)
      : source_(source), options_(options) {}

  std::vector<Assignment> match(std::span<const NamedTensor> targets) {
    std::vector<Assignment> assignments;
    for (const NamedTensor& target : targets) {
      const StoredForm form =
          options_.stored ? options_.stored(target.name) : StoredForm{target.name};
      const StoredTensor* const stored = source_.find(form.name);
      if (stored == nullptr) {
        missing_.add(quote(form.name));
        continue;
      }
      used_.insert(stored);
      check_shape(*stored, target, form.transposed);
      check_dtype(*stored, target);
      assignments.push_back({stored, &target, form.transposed});
    }
    check_unexpected();
    throw_mismatches(targets.size());
    return assignments;
  }

 private:
  void check_shape(const StoredTensor& stored, const NamedTensor& target, bool transposed) {
    std::vector<std::int64_t> wanted = target.tensor.sizes().vec();
    if (transposed) std::reverse(wanted.begin(), wanted.end());
    if (wanted == stored.entry->shape && (!transposed || wanted.size() == 2)) return;
    shapes_.add(fmt::format("{} is {} in the file and {} in the model", quote(stored.name()),
                            shape_text(stored.entry->shape), shape_text(wanted)));
  }

  void check_dtype(const StoredTensor& stored, const NamedTensor& target) {
    const auto wanted = dtype_of(target.tensor.scalar_type());
    const DType found = stored.entry->dtype;
    if (wanted == found) return;
    const bool both_floating = wanted && is_floating(*wanted) && is_floating(found);
    if (both_floating && options_.conversion == Conversion::floating) return;
    dtypes_.add(fmt::format("{} is {} in the file and {} in the model", quote(stored.name()),
                            name(found), c10::toString(target.tensor.scalar_type())));
  }

  void check_unexpected() {
    if (options_.unexpected == Unexpected::ignored) return;
    for (const StoredTensor& stored : source_.tensors())
      if (!used_.contains(&stored) && !(options_.skipped && options_.skipped(stored.name())))
        unexpected_.add(quote(stored.name()));
  }

  void throw_mismatches(std::size_t num_targets) const {
    if (!missing_.any() && !unexpected_.any() && !shapes_.any() && !dtypes_.any()) return;
    throw UsageError(
        "'{}' holds {} tensors that do not fit the {} of this model: it is a checkpoint "
        "of another model, or of another configuration of it{}{}{}{}",
        source_.path().string(), source_.tensors().size(), num_targets, missing_.text(),
        unexpected_.text(), shapes_.text(), dtypes_.text());
  }

  const SafetensorsFolder& source_;
  const LoadOptions& options_;
  std::set<const StoredTensor*> used_;
  Mismatches missing_{"missing from the file"};
  Mismatches unexpected_{"in the file and not in the model"};
  Mismatches shapes_{"of another shape"};
  Mismatches dtypes_{"of another dtype"};
};

// The stored values on the CPU, in the mapped file itself where they are aligned. Valid as long as
// the source is; not to be written to.
at::Tensor view_of(const StoredTensor& stored) {
  const auto type = scalar_type_of(stored.entry->dtype);
  if (!type)
    throw UsageError("'{}', tensor {}: this LibTorch has no dtype {}", stored.file->path().string(),
                     quote(stored.name()), name(stored.entry->dtype));
  const auto options = at::TensorOptions(*type).device(at::kCPU);
  const auto bytes = stored.bytes();
  const auto alignment = c10::elementSize(*type);
  if (!bytes.empty() && reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment == 0)
    return at::from_blob(const_cast<std::byte*>(bytes.data()), stored.entry->shape, options);
  at::Tensor copy = at::empty(stored.entry->shape, options);
  if (!bytes.empty()) std::memcpy(copy.data_ptr(), bytes.data(), bytes.size());
  return copy;
}

void check_targets(std::span<const NamedTensor> targets) {
  for (const NamedTensor& target : targets)
    if (!target.tensor.defined() || target.tensor.is_meta())
      throw UsageError("the tensor {} cannot be loaded into: it is {}", quote(target.name),
                       target.tensor.defined() ? "on the meta device" : "undefined");
}

}  // namespace

LoadReport load_tensors_into(const SafetensorsFolder& source, std::span<const NamedTensor> targets,
                             const LoadOptions& options) {
  check_targets(targets);
  const c10::NoGradGuard no_grad;
  LoadReport report;
  for (const auto& [stored, target, transposed] : Matcher(source, options).match(targets)) {
    const at::Tensor values = view_of(*stored);
    at::Tensor destination = target->tensor;
    destination.copy_(transposed ? values.t() : values);
    if (values.scalar_type() != destination.scalar_type()) report.converted.push_back(target->name);
  }
  return report;
}

void check_fit(const SafetensorsFolder& source, std::span<const NamedTensor> targets,
               const LoadOptions& options) {
  check_targets(targets);
  Matcher(source, options).match(targets);
}

LoadReport load_tensors_into(const std::filesystem::path& source,
                             std::span<const NamedTensor> targets, const LoadOptions& options) {
  return load_tensors_into(SafetensorsFolder(source), targets, options);
}

std::vector<NamedTensor> load_tensors(const std::filesystem::path& source) {
  const SafetensorsFolder folder(source);
  std::vector<NamedTensor> result;
  for (const StoredTensor& stored : folder.tensors())
    result.push_back({stored.name(), view_of(stored).clone()});
  return result;
}

}  // namespace lockstep::checkpoint
