// silu(gate) · up on CUDA, forward and backward. In builds whose LibTorch has CUDA.
//
// All tensors have `count` elements of the type one after the other. In float. Both are put on the
// stream, and nothing waits; whether they could be started, cudaGetLastError() says.
#pragma once

#include <cstdint>

#include <lockstep/nn/kernels/cuda/element.h>

struct CUstream_st;

namespace lockstep::nn::cuda {

void silu_multiply(Element type, std::int64_t count, const void* gate, const void* up, void* result,
                   CUstream_st* stream);
void silu_multiply_backward(Element type, std::int64_t count, const void* gate, const void* up,
                            const void* gradient, void* gate_gradient, void* up_gradient,
                            CUstream_st* stream);

}  // namespace lockstep::nn::cuda
