#include <lockstep/checkpoint/tensors.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/writer.h>

namespace lockstep::checkpoint {

namespace {

// Types are matched by LibTorch's names for them, because older versions lack some types and their
// enumerators.
constexpr std::pair<DType, std::string_view> kTypes[] = {
    {DType::boolean, "Bool"},
    {DType::u8, "Byte"},
    {DType::i8, "Char"},
    {DType::f8_e5m2, "Float8_e5m2"},
    {DType::f8_e4m3, "Float8_e4m3fn"},
    {DType::f8_e8m0, "Float8_e8m0fnu"},
    {DType::f8_e4m3fnuz, "Float8_e4m3fnuz"},
    {DType::f8_e5m2fnuz, "Float8_e5m2fnuz"},
    {DType::i16, "Short"},
    {DType::u16, "UInt16"},
    {DType::f16, "Half"},
    {DType::bf16, "BFloat16"},
    {DType::i32, "Int"},
    {DType::u32, "UInt32"},
    {DType::f32, "Float"},
    {DType::c64, "ComplexFloat"},
    {DType::f64, "Double"},
    {DType::i64, "Long"},
    {DType::u64, "UInt64"},
};

}  // namespace

std::optional<DType> dtype_of(c10::ScalarType type) {
  for (const auto& [dtype, name] : kTypes)
    if (name == c10::toString(type)) return dtype;
  return std::nullopt;
}

std::optional<c10::ScalarType> scalar_type_of(DType dtype) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i)
    if (const auto type = static_cast<c10::ScalarType>(i); dtype_of(type) == dtype) return type;
  return std::nullopt;
}

namespace {

struct Assignment {
  const StoredTensor* stored = nullptr;
  const NamedTensor* target = nullptr;
  bool transposed = false;
};

// Pairs every target with the tensor that the file has for it.
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

// The stored values as a tensor on the CPU, in the mapped file itself if they are aligned there.
// Valid as long as the source is; must not be written to.
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

namespace {

struct TensorsToSave {
  std::vector<TensorDeclaration> declarations;
  std::map<std::string, std::pair<const at::Tensor*, bool>> sources;  // file's name; transposed
};

DType checked_dtype(const NamedTensor& named, const StoredForm& form) {
  const at::Tensor& tensor = named.tensor;
  const std::string what = fmt::format("the tensor {} cannot be saved", quote(named.name));
  if (!tensor.defined()) throw UsageError("{}: it is undefined", what);
  if (tensor.layout() != at::kStrided)
    throw UsageError("{}: its layout is {}; make it dense (to_dense())", what,
                     tensor.layout() == at::kSparse ? "sparse" : "not strided");
  if (tensor.is_meta()) throw UsageError("{}: it is on the meta device and has no values", what);
  if (form.transposed && tensor.dim() != 2)
    throw UsageError("{}: it is to be stored transposed, and its shape is {}", what,
                     shape_text(tensor.sizes()));
  const auto dtype = dtype_of(tensor.scalar_type());
  if (!dtype)
    throw UsageError("{}: safetensors files cannot hold its dtype, {}; convert it first", what,
                     c10::toString(tensor.scalar_type()));
  return *dtype;
}

TensorsToSave declare(std::span<const NamedTensor> tensors, const SaveOptions& options) {
  TensorsToSave result;
  for (const NamedTensor& named : tensors) {
    StoredForm form = options.stored ? options.stored(named.name) : StoredForm{named.name};
    const DType dtype = checked_dtype(named, form);
    std::vector<std::int64_t> shape = named.tensor.sizes().vec();
    if (form.transposed) std::swap(shape[0], shape[1]);
    result.declarations.push_back({form.name, dtype, std::move(shape)});
    result.sources.emplace(std::move(form.name), std::pair(&named.tensor, form.transposed));
  }
  return result;
}

}  // namespace

void save_tensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                  const SaveOptions& options) {
  const c10::NoGradGuard no_grad;
  const TensorsToSave declared = declare(tensors, options);
  SafetensorsWriter writer(path, declared.declarations, options.metadata);
  for (const TensorEntry& entry : writer.entries()) {
    const auto& [tensor, transposed] = declared.sources.at(entry.name);
    const at::Tensor host =
        (transposed ? tensor->t() : *tensor).to(at::kCPU).resolve_conj().resolve_neg().contiguous();
    LOCKSTEP_CHECK(host.nbytes() == entry.size_bytes(), "tensor {}", entry.name);
    writer.write({static_cast<const std::byte*>(host.data_ptr()), host.nbytes()});
  }
  writer.commit();
}

std::uint64_t file_bytes(std::span<const NamedTensor> tensors, const SaveOptions& options) {
  return plan_safetensors(declare(tensors, options).declarations, options.metadata).file_bytes();
}

}  // namespace lockstep::checkpoint
