// A tensor of which a rank holds some elements.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep::mesh {

struct HeldTensor {
  std::string name;
  // What this rank has of it, on any device and of any strides: as many elements as the placement
  // holds, in its order.
  at::Tensor values;
  std::vector<std::int64_t> shape;  // of the whole tensor
  Placement placement;              // of that shape, or of another with as many elements
};

// One that every rank has all of.
inline HeldTensor whole_tensor(std::string name, const at::Tensor& tensor) {
  return {std::move(name), tensor.requires_grad() ? tensor.detach() : tensor, tensor.sizes().vec(),
          Placement::full(tensor.sizes().vec())};
}

}  // namespace lockstep::mesh
