// Sums of squares over the norm's blocks on CUDA, of many tensors in a launch: the CPU's bits. In
// builds whose LibTorch has CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include <lockstep/optim/kernels/sum_of_squares.h>

struct CUstream_st;

namespace lockstep::optim::cuda {

enum class Element : std::uint8_t { float64, float32, float16, bfloat16 };

struct NormTensor {
  std::int64_t count;
  const void* values;
  double* sums;  // one for each block of kNormBlock elements
  Element type;
};

// It is put on the stream, and nothing waits; whether it could be started, cudaGetLastError() says.
void sum_of_squares(const NormTensor* tensors, std::size_t size, CUstream_st* stream);

}  // namespace lockstep::optim::cuda
