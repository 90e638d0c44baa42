#include <lockstep/checkpoint/host_copy.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/scalar_type.h>
#include <lockstep/device/host_memory.h>

namespace lockstep::checkpoint {

namespace {

// So that copies of any type of element begin well.
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

}  // namespace lockstep::checkpoint
