// What a reduction must give, worked out from the rule as it is written down and without any code
// of the library's.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/operations/operation.h>

namespace lockstep::comm::conformance {

extern const std::vector<at::ScalarType> kDTypes;
extern const std::vector<ReduceOp> kReductions;

// Whether the reduction is defined for the dtype.
bool defined(ReduceOp op, at::ScalarType dtype);

// The same on every rank for the same seed: any rank can tell what another one has. Floats are of
// very different sizes, so that the order of addition shows; integers overflow.
at::Tensor values(at::ScalarType dtype, std::int64_t count, std::uint64_t seed);

// Ranks [0, n) split at the largest power of two below n, recursively; 16-bit floats added as
// 32-bit ones; the mean is the sum divided once.
at::Tensor canonical(const std::vector<at::Tensor>& inputs, ReduceOp op);

// Whether `got` is what adding in some other order could give: equal for integers, min and max,
// within the rounding of size-1 additions otherwise. NaN equals NaN.
bool within_rounding(const at::Tensor& got, const at::Tensor& wanted,
                     const std::vector<at::Tensor>& inputs, ReduceOp op);

}  // namespace lockstep::comm::conformance
