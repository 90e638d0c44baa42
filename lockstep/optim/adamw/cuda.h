// Adam's kernel on CUDA, in builds whose LibTorch has it: many tensors in a launch, with the CPU's
// bits.
//
// It takes memory of the current device. It is put on the stream, and nothing waits; whether it
// could be started, cudaGetLastError() says.
#pragma once

#include <cstddef>
#include <cstdint>

#include <lockstep/optim/adamw/plain/kernel.h>

struct CUstream_st;

namespace lockstep::optim::cuda {

// One step of Adam, with gradients times *factor (1 where there is none); nothing changes where
// that is 0.
template <typename T>
struct AdamTensor {
  std::int64_t count;
  T* weight;
  const T* gradient;
  T* exp_avg;
  T* exp_avg_sq;
  AdamStep<T> step;
};

void adam_update(const AdamTensor<float>* tensors, std::size_t size, const double* factor,
                 CUstream_st* stream);
void adam_update(const AdamTensor<double>* tensors, std::size_t size, const double* factor,
                 CUstream_st* stream);

}  // namespace lockstep::optim::cuda
