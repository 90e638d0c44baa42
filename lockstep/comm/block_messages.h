// Tensors to messages of quantized blocks and back, where they lie: by vector code on the CPU, by
// kernels on CUDA, with the same bits.
//
// Tensors are contiguous, on one device; values are Float, Half or BFloat16. Messages are Byte,
// [number of messages, encoded_bytes(count of a part, format)]. On CUDA all is put on the current
// stream, and nothing waits. Autograd sees nothing of it. For any number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/comm/codecs/block_format.h>
#include <lockstep/comm/codecs/message_table.h>

namespace lockstep::comm {

// UsageError where tensors on that device cannot be quantized, or not by this build.
void check_quantizes_on(c10::Device device);

void encode_parts(const BlockFormat& format, const at::Tensor& values, const PartTable& table,
                  const at::Tensor& messages);

// values ← sums of messages, in the canonical order, over the divisor.
void decode_sums(const BlockFormat& format, const at::Tensor& messages, const SumTable& table,
                 float divisor, const at::Tensor& values);

}  // namespace lockstep::comm
