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

std::string fit_fault(const CheckpointReader& reader, std::span<const mesh::HeldTensor> tensors) {
  constexpr std::size_t kNamed = 5;
  std::vector<std::string> faults;
  std::size_t num_faults = 0;
  for (const mesh::HeldTensor& tensor : tensors) {
    const TensorRecord* const record = reader.find(tensor.name);
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

void load_held(CheckpointReader& reader, std::span<const mesh::HeldTensor> tensors) {
  const c10::NoGradGuard no_grad;
  const auto bytes_of = [](const at::Tensor& host) {
    return std::span(static_cast<std::byte*>(host.data_ptr()), host.nbytes());
  };
  std::vector<CheckpointReader::Wanted> direct;
  for (const mesh::HeldTensor& tensor : tensors) {
    if (tensor.placement.empty()) continue;
    if (tensor.values.device().is_cpu() && tensor.values.is_contiguous()) {
      direct.push_back({tensor.name, tensor.placement, bytes_of(tensor.values)});
      continue;
    }
    const at::Tensor host =
        at::empty(tensor.values.sizes(), at::dtype(tensor.values.scalar_type()));
    reader.read(tensor.name, tensor.placement, bytes_of(host));
    tensor.values.copy_(host);
  }
  reader.read(direct);
}

}  // namespace lockstep::checkpoint
