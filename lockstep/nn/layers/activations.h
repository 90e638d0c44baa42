// Activation functions: GELU, and the gate of SwiGLU.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

enum class GeluKind : std::uint8_t {
  tanh,  // GPT-2's approximation, Hugging Face's gelu_new
  erf,   // x·P(X < x), X standard normal
};

// x may have any shape. Contiguous float32 on a CPU goes through a loop of ours, which keeps only x
// for backward; everything else goes through ATen's gelu. -inf gives NaN, as it does there.
at::Tensor gelu(const at::Tensor& x, GeluKind kind);

// SwiGLU's gate: silu(gate)·up = gate·sigmoid(gate)·up, element by element, of two tensors of the
// same shape. Contiguous float32 on a CPU goes through a loop of ours, which keeps only the two
// inputs for backward; everything else goes through ATen's operators.
at::Tensor silu_multiply(const at::Tensor& gate, const at::Tensor& up);

}  // namespace lockstep::nn
