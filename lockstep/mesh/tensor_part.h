// The part of a tensor that a placement's box names. Row-major order is what counts: a placement of
// another shape with as many elements ([3, n, m] of a tensor [3·n, m]) is of the same tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep::mesh {

// A copy of it, in the box's shape. Of placements that hold whole boxes.
at::Tensor part_of(const at::Tensor& whole, const Placement& placement);

// The reverse: writes it into a contiguous tensor. `part` may be of any shape with as many
// elements.
void write_part(const at::Tensor& whole, const Placement& placement, const at::Tensor& part);

}  // namespace lockstep::mesh
