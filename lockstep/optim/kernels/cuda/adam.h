// One step of Adam on CUDA, of many tensors in a launch: the CPU's bits. In builds whose LibTorch
// has CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include <lockstep/optim/kernels/adam.h>

struct CUstream_st;

namespace lockstep::optim::cuda {

template <typename T>
struct AdamTensor {
  std::int64_t count;
  T* weight;
  const T* gradient;
  T* exp_avg;
  T* exp_avg_sq;
  AdamStep<T> step;
};

// It is put on the stream, and nothing waits; whether it could be started, cudaGetLastError() says.
void adam_update(const AdamTensor<float>* tensors, std::size_t size, CUstream_st* stream);
void adam_update(const AdamTensor<double>* tensors, std::size_t size, CUstream_st* stream);

}  // namespace lockstep::optim::cuda
