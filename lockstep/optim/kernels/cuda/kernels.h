// The gradient norm's kernels on CUDA, in builds whose LibTorch has it: many tensors in a launch,
// with the CPU's bits.
//
// They take memory of the current device. Each is put on the stream, and nothing waits; whether it
// could be started, cudaGetLastError() says.
#pragma once

#include <cstddef>
#include <cstdint>

#include <lockstep/optim/kernels/gradients.h>

struct CUstream_st;

namespace lockstep::optim::cuda {

// Sums of squares over the norm's blocks.
enum class Element : std::uint8_t { float64, float32, float16, bfloat16 };

struct NormTensor {
  std::int64_t count;
  const void* values;
  double* sums;  // one for each block of kNormBlock elements
  Element type;
};

void sum_of_squares(const NormTensor* tensors, std::size_t size, CUstream_st* stream);

// Sums of numbers, each added one after the other as a single thread would. `table` is on the
// device: which segment each sum begins with, from 0, and how many segments there are; then the
// begin and end of each segment in `values`.
void add_in_order(const double* values, const std::int64_t* table, std::int64_t num_sums,
                  double* sums, CUstream_st* stream);

}  // namespace lockstep::optim::cuda
