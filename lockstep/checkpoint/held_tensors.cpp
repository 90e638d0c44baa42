#include <lockstep/checkpoint/held_tensors.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/tensors.h>
#include <lockstep/device/host_memory.h>

namespace lockstep::checkpoint {

namespace {

// Aligns the copies for elements of any type.
constexpr std::int64_t kAlignment = 64;

DType checked_dtype(const mesh::HeldTensor& tensor) {
  const at::Tensor& values = tensor.values;
  const auto refuse = [&](const std::string& why) {
    throw UsageError("{} cannot be saved: {}", quote(tensor.name), why);
  };
  if (!values.defined()) refuse("it is undefined");
  if (values.layout() != at::kStrided || values.is_quantized())
    refuse("it is sparse or quantized; a checkpoint has plain tensors");
  const auto dtype = dtype_of(values.scalar_type());
  if (!dtype) refuse(fmt::format("safetensors has no {}", c10::toString(values.scalar_type())));
  LOCKSTEP_CHECK(values.numel() == tensor.placement.elements(), "{} elements of {} as {}",
                 values.numel(), tensor.name, tensor.placement.text());
  return *dtype;
}

}  // namespace

std::vector<HeldPiece> held_pieces(std::span<const mesh::HeldTensor> tensors) {
  std::vector<HeldPiece> pieces;
  for (const mesh::HeldTensor& tensor : tensors) {
    const DType dtype = checked_dtype(tensor);
    pieces.push_back({tensor.name, dtype, tensor.shape, tensor.placement});
  }
  return pieces;
}

std::int64_t HostCopy::room_for(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void HostCopy::take(std::span<const mesh::HeldTensor> tensors, std::span<const WrittenPart> parts,
                    What what) {
  const c10::NoGradGuard no_grad;
  const auto stays = [&](const WrittenPart& part) {
    const at::Tensor& values = tensors[part.piece].values;
    return what == What::elsewhere && values.device().is_cpu() && values.is_contiguous();
  };
  const auto bytes_of = [&](const WrittenPart& part) {
    return part.part.size() * static_cast<std::int64_t>(tensors[part.piece].values.element_size());
  };
  std::int64_t total = 0;
  c10::Device device(at::kCPU);
  for (const WrittenPart& part : parts) {
    if (stays(part)) continue;
    total += room_for(bytes_of(part));
    const c10::Device its = tensors[part.piece].values.device();
    if (!its.is_cpu()) device = its;
  }
  if (!memory_.defined() || memory_.numel() < total)
    memory_ = device::host_memory(total, at::kByte, device);
  pieces_.clear();
  std::int64_t offset = 0;
  for (const WrittenPart& part : parts) {
    const mesh::HeldTensor& tensor = tensors[part.piece];
    const std::int64_t bytes = bytes_of(part);
    at::Tensor place = tensor.values.reshape({-1}).narrow(0, part.part.begin, part.part.size());
    if (!stays(part)) {
      const at::Tensor copy = memory_.narrow(0, offset, bytes).view(tensor.values.scalar_type());
      copy.copy_(place, /*non_blocking=*/true);
      place = copy;
      offset += room_for(bytes);
    }
    pieces_.push_back(
        {tensor.name,
         checked_dtype(tensor),
         tensor.shape,
         tensor.placement.cut_flat(part.part),
         {static_cast<const std::byte*>(place.data_ptr()), static_cast<std::size_t>(bytes)}});
  }
  copied_bytes_ = total;
  if (!device.is_cpu()) device::wait_for(device);
}

at::Tensor HostCopy::bytes() const { return memory_.narrow(0, 0, copied_bytes_); }

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

// Tensors that can be read straight into their memory are read together.
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
