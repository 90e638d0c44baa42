// The expected results of reductions, computed from the written rule without any code of the
// library.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/operations/operation.h>

namespace lockstep::comm::conformance {

extern const std::vector<at::ScalarType> kDTypes;
extern const std::vector<ReduceOp> kReductions;

// Whether the reduction is defined for the dtype.
bool defined(ReduceOp op, at::ScalarType dtype);

// Values that are the same on every rank for the same seed, so any rank can compute another one's.
// Floats have very different sizes, which makes the order of addition show; integers overflow.
at::Tensor values(at::ScalarType dtype, std::int64_t count, std::uint64_t seed);

// The canonical reduction: ranks [0, n) split at the largest power of two below n, recursively;
// 16-bit floats are added as 32-bit ones; a mean is the sum divided once.
at::Tensor canonical(const std::vector<at::Tensor>& inputs, ReduceOp op);

// Whether adding in another order could give `got`: equal for integers, min and max, otherwise
// within the rounding of size-1 additions. NaN equals NaN.
bool within_rounding(const at::Tensor& got, const at::Tensor& wanted,
                     const std::vector<at::Tensor>& inputs, ReduceOp op);

}  // namespace lockstep::comm::conformance
