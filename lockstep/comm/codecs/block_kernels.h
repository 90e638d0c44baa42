// The codec (block_quantizer.h) on CUDA, for tables of messages, with the same bits. Only builds
// whose LibTorch has CUDA contain it.
//
// Pointers are to the current device's memory, messages at multiples of 4. The functions put
// kernels on the stream and do not wait; cudaGetLastError() says whether these could be started.
#pragma once

#include <cstddef>

#include <lockstep/comm/codecs/block_format.h>
#include <lockstep/comm/operations/operation.h>

struct CUstream_st;

namespace lockstep::comm::cuda {

void encode_parts(const BlockFormat& format, DType dtype, const std::byte* values,
                  const PartTable& table, std::byte* messages, CUstream_st* stream);

// At most kMostTerms.
constexpr std::size_t kMostTerms = 0xffff;
void decode_sums(const BlockFormat& format, DType dtype, const std::byte* messages,
                 const SumTable& table, float divisor, std::byte* values, CUstream_st* stream);

}  // namespace lockstep::comm::cuda
