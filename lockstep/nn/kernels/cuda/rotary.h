// Rotary positions on CUDA. In builds whose LibTorch has CUDA.
#pragma once

#include <cstdint>

#include <lockstep/nn/kernels/cuda/element.h>

struct CUstream_st;

namespace lockstep::nn::cuda {

// Heads of tokens: [batch, heads, length, 2 · half]. Elements of a head lie next to each other; the
// other strides are in elements. Addresses, strides and `half` are multiples of 4 elements.
struct RotaryShape {
  Element type = Element::float32;
  std::int64_t batch = 0, heads = 0, length = 0, half = 0;
  std::int64_t batch_stride = 0, head_stride = 0, token_stride = 0;
};

// Turns x by the angles whose cosines and sines are given, [length, half] each, or back by them
// with direction = -1. The result is [batch, length, heads, 2 · half], one after the other. In
// float. It is put on the stream, and nothing waits; whether it could be started,
// cudaGetLastError() says.
void turn(const RotaryShape& shape, const void* x, const float* cosines, const float* sines,
          float direction, void* result, CUstream_st* stream);

}  // namespace lockstep::nn::cuda
