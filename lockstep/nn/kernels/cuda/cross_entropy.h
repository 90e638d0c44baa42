// Softmax and cross-entropy of a block of logits on CUDA: one kernel, which turns the logits into
// their gradient where they are. In builds whose LibTorch has CUDA.
#pragma once

#include <cstdint>

#include <lockstep/nn/kernels/cuda/element.h>

struct CUstream_st;

namespace lockstep::nn::cuda {

struct LogitBlock {
  void* logits = nullptr;  // [rows, vocabulary], one row after the other
  Element type = Element::float32;
  const std::int64_t* targets = nullptr;  // [rows]
  std::int64_t rows = 0;
  std::int64_t vocabulary = 0;
  std::int64_t ignore_index = 0;
};

// The loss of each row, 0 where its target is ignore_index, nan where it is outside the vocabulary;
// with `gradients` the logits become softmax - one_hot(target), and 0 in rows that are ignored.
// Computed in float. It is put on the stream, and nothing waits; whether it could be started,
// cudaGetLastError() says.
void softmax_cross_entropy(const LogitBlock& block, float* losses, bool gradients,
                           CUstream_st* stream);

}  // namespace lockstep::nn::cuda
