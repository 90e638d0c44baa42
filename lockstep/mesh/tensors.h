// Tensors as parts hand them to each other: with a name, and with the placement that says which
// elements a rank holds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep {

// A tensor and its name in its model: parameters, buffers, gradients and optimizer state are passed
// so.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace lockstep

namespace lockstep::mesh {

// A tensor of which a rank holds some elements.
struct HeldTensor {
  std::string name;
  // The elements that the placement holds, in its order; on any device and with any strides.
  at::Tensor values;
  std::vector<std::int64_t> shape;  // of the whole tensor
  Placement placement;              // of that shape, or of another with as many elements
};

// A tensor that every rank holds as a whole.
inline HeldTensor whole_tensor(std::string name, const at::Tensor& tensor) {
  return {std::move(name), tensor.requires_grad() ? tensor.detach() : tensor, tensor.sizes().vec(),
          Placement::full(tensor.sizes().vec())};
}

// A copy of the part that the placement's box names, in the box's shape. The placement must hold
// the whole box. Row-major order is what counts: a placement of another shape with as many elements
// ([3, n, m] for a tensor [3·n, m]) will do.
at::Tensor part_of(const at::Tensor& whole, const Placement& placement);

// The reverse: writes `part` into a contiguous tensor. It may have any shape with as many elements.
void write_part(const at::Tensor& whole, const Placement& placement, const at::Tensor& part);

}  // namespace lockstep::mesh
