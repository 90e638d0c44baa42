// The Gaussian error linear unit.
#pragma once

#include <ATen/ATen.h>

namespace lockstep::nn {

enum class GeluKind { tanh, erf };

inline at::Tensor gelu(const at::Tensor& x, GeluKind kind) {
  return at::gelu(x, kind == GeluKind::tanh ? "tanh" : "none");
}

}  // namespace lockstep::nn
