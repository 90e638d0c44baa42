#include <map>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/writer.h>
#include <lockstep/checkpoint/scalar_type.h>
#include <lockstep/checkpoint/tensors.h>

namespace lockstep::checkpoint {

namespace {

struct Plan {
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

Plan plan(std::span<const NamedTensor> tensors, const SaveOptions& options) {
  Plan result;
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
  const Plan planned = plan(tensors, options);
  SafetensorsWriter writer(path, planned.declarations, options.metadata);
  for (const TensorEntry& entry : writer.entries()) {
    const auto& [tensor, transposed] = planned.sources.at(entry.name);
    const at::Tensor host =
        (transposed ? tensor->t() : *tensor).to(at::kCPU).resolve_conj().resolve_neg().contiguous();
    LOCKSTEP_CHECK(host.nbytes() == entry.size_bytes(), "tensor {}", entry.name);
    writer.write({static_cast<const std::byte*>(host.data_ptr()), host.nbytes()});
  }
  writer.commit();
}

std::uint64_t file_bytes(std::span<const NamedTensor> tensors, const SaveOptions& options) {
  return plan_safetensors(plan(tensors, options).declarations, options.metadata).file_bytes();
}

}  // namespace lockstep::checkpoint
