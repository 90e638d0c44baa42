// SwiGLU's gate.
#pragma once

#include <ATen/ATen.h>

namespace lockstep::nn {

// silu(gate) · up, element by element.
inline at::Tensor silu_multiply(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

}  // namespace lockstep::nn
