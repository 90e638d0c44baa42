#include <lockstep/checkpoint/load_held.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/scalar_type.h>

namespace lockstep::checkpoint {

namespace {

std::string described(std::optional<DType> dtype, const std::vector<std::int64_t>& shape) {
  return fmt::format("{} {}", dtype ? name(*dtype) : "of another type", shape_text(shape));
}

}  // namespace

std::string fit_fault(const StoredTensors& stored, std::span<const mesh::HeldTensor> tensors) {
  constexpr std::size_t kNamed = 5;
  std::vector<std::string> faults;
  std::size_t num_faults = 0;
  for (const mesh::HeldTensor& tensor : tensors) {
    const auto found = stored.find(tensor.name);
    const TensorRecord* const record = found == stored.end() ? nullptr : &found->second;
    const auto dtype = dtype_of(tensor.values.scalar_type());
    if (record != nullptr && record->dtype == dtype && record->shape == tensor.shape) continue;
    ++num_faults;
    if (faults.size() == kNamed) continue;
    if (record == nullptr)
      faults.push_back(fmt::format("{} is missing", quote(tensor.name)));
    else
      faults.push_back(fmt::format("{} is {} in the checkpoint and {} here", quote(tensor.name),
                                   described(record->dtype, record->shape),
                                   described(dtype, tensor.shape)));
  }
  if (faults.empty()) return "";
  if (num_faults > faults.size())
    faults.push_back(fmt::format("and {} more", num_faults - faults.size()));
  return fmt::format("{}", fmt::join(faults, "; "));
}

HeldBytes::HeldBytes(const mesh::HeldTensor& tensor) : tensor_(tensor) {
  const at::Tensor& values = tensor.values;
  const bool direct = values.device().is_cpu() && values.is_contiguous();
  host_ = direct ? values : at::empty(values.sizes(), at::dtype(values.scalar_type()));
}

std::span<std::byte> HeldBytes::span() const {
  return {static_cast<std::byte*>(host_.data_ptr()), host_.nbytes()};
}

void HeldBytes::finish() {
  const c10::NoGradGuard no_grad;
  if (!direct()) tensor_.values.copy_(host_);
}

// What can be read straight into its place is read together.
void load_held(CheckpointReader& reader, std::span<const mesh::HeldTensor> tensors) {
  std::vector<CheckpointReader::Wanted> direct;
  for (const mesh::HeldTensor& tensor : tensors) {
    if (tensor.placement.empty()) continue;
    HeldBytes bytes(tensor);
    if (bytes.direct()) {
      direct.push_back({tensor.name, tensor.placement, bytes.span()});
      continue;
    }
    reader.read(tensor.name, tensor.placement, bytes.span());
    bytes.finish();
  }
  reader.read(direct);
}

}  // namespace lockstep::checkpoint
