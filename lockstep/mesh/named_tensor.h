// A tensor and what it is called in its model: how parameters, buffers, gradients and optimizer
// state are handed from part to part.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace lockstep {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace lockstep
