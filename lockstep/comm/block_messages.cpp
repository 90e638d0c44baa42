#include <lockstep/comm/block_messages.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/codecs/block_quantizer.h>
#include <lockstep/comm/scalar_type.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/comm/codecs/block_kernels.h>
#endif

namespace lockstep::comm {

namespace {

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

void check_messages(const at::Tensor& messages, std::size_t number, std::size_t count,
                    const BlockFormat& format) {
  LOCKSTEP_CHECK(messages.scalar_type() == at::kByte && messages.dim() == 2 &&
                     messages.is_contiguous() &&
                     messages.size(0) == static_cast<std::int64_t>(number) &&
                     messages.size(1) == static_cast<std::int64_t>(encoded_bytes(count, format)),
                 "{} messages of {} numbers", number, count);
  // Scales are floats.
  LOCKSTEP_CHECK(reinterpret_cast<std::uintptr_t>(messages.data_ptr()) % 4 == 0);
}

}  // namespace

void check_quantizes_on(c10::Device device) {
#ifdef LOCKSTEP_HAVE_CUDA
  if (device.is_cuda()) return;
#else
  if (device.is_cuda())
    throw UsageError("tensors on {} cannot be quantized by this build of Lockstep, which was made "
                     "for a LibTorch without CUDA: build it with the preset cuda",
                     device.str());
#endif
  if (!device.is_cpu())
    throw UsageError("tensors on {} cannot be quantized: those on the CPU and on CUDA can",
                     device.str());
}

void encode_parts(const BlockFormat& format, const at::Tensor& values, const PartTable& table,
                  const at::Tensor& messages) {
  check_quantizes_on(values.device());
  check_messages(messages, table.num_parts(), table.count, format);
  const DType dtype = dtype_of(values.scalar_type());
#ifdef LOCKSTEP_HAVE_CUDA
  if (values.is_cuda()) {
    const c10::cuda::CUDAGuard on_device(values.device());
    cuda::encode_parts(format, dtype, data_of(values), table, data_of(messages),
                       c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
#endif
  const std::size_t part_bytes = table.count * values.element_size();
  const std::size_t message_bytes = encoded_bytes(table.count, format);
  for (std::size_t message = 0; message < table.num_parts(); ++message)
    encode_blocks(format, dtype, data_of(values) + table.part_of(message) * part_bytes, table.count,
                  data_of(messages) + message * message_bytes);
}

void decode_sums(const BlockFormat& format, const at::Tensor& messages, const SumTable& table,
                 float divisor, const at::Tensor& values) {
  check_quantizes_on(values.device());
  check_messages(messages, table.num_messages(), table.count, format);
  const DType dtype = dtype_of(values.scalar_type());
#ifdef LOCKSTEP_HAVE_CUDA
  if (values.is_cuda()) {
    LOCKSTEP_CHECK(table.terms <= cuda::kMostTerms, "a sum of {} messages", table.terms);
    const c10::cuda::CUDAGuard on_device(values.device());
    cuda::decode_sums(format, dtype, data_of(messages), table, divisor, data_of(values),
                      c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
#endif
  const std::size_t part_bytes = table.count * values.element_size();
  const std::size_t message_bytes = encoded_bytes(table.count, format);
  for (std::size_t part = 0; part < table.parts; ++part)
    decode_sum(format, dtype,
               {.first = data_of(messages) + part * message_bytes,
                .number = table.terms,
                .stride = table.parts * message_bytes},
               table.count, divisor, data_of(values) + part * part_bytes);
}

}  // namespace lockstep::comm
