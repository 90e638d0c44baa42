// SwiGLU's gate.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// silu(gate)·up = gate·sigmoid(gate)·up, element by element, of two tensors of the same shape.
// Contiguous float32 on a CPU goes through a loop of ours, which keeps nothing but the two for
// backward; everything else through ATen's operators.
at::Tensor silu_multiply(const at::Tensor& gate, const at::Tensor& up);

}  // namespace lockstep::nn
