// Communication between the ranks of a tensor axis: operations that autograd follows, in pairs of
// which each is the other's backward.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/nn/tensor_parallel/tensor_axis.h>

namespace lockstep::nn {

// Each rank has an equal part of the dim that is cut, in the order of ranks, unless said otherwise;
// UsageError, with the numbers, if that is impossible. Every rank calls these with the same shapes,
// and runs backward at the same point.

// Turns x as ranks hold it between layers into all of x, which each rank needs for its product.
// Backward sums the gradients of the ranks' products.
at::Tensor enter_products(const at::Tensor& x, const TensorAxis& axis);
// The inverse, for partial sums: returns their sum over the ranks, as ranks hold it between layers.
at::Tensor leave_products(const at::Tensor& x, const TensorAxis& axis);

// gather_features() puts all ranks' parts along the last dim, one after the other, on every rank;
// take_features() returns this rank's part of a tensor that all ranks have. Gathered parts may have
// different widths. Computations that follow are the same on every rank.
at::Tensor gather_features(const at::Tensor& x, const TensorAxis& axis);
at::Tensor take_features(const at::Tensor& x, const TensorAxis& axis);

// The same along any dim, for equal parts.
at::Tensor gather_parts(const at::Tensor& x, std::int64_t dim, const TensorAxis& axis);
at::Tensor take_part(const at::Tensor& x, std::int64_t dim, const TensorAxis& axis);

// From now on every gradient of this parameter is first summed over the group. This is for a
// parameter that each rank has whole and uses for a part of the work. It may be frozen now and
// thawed later.
void sum_gradients_over(const at::Tensor& parameter, std::shared_ptr<comm::Communicator> group);

namespace internal {

// Communication without autograd: `result` is complete once wait() has returned.
class Moving {
 public:
  Moving(at::Tensor result, comm::Work work) : result_(std::move(result)), work_(std::move(work)) {}

  at::Tensor wait();

 private:
  at::Tensor result_;
  comm::Work work_;
};

// Starts the sum over the ranks of their products' gradients of x; the result has the form of x
// between layers. `partial` is contiguous and belongs to the caller, who must not use it until
// then.
Moving start_sum(at::Tensor partial, const TensorAxis& axis);

// Gathers all of x [batch, length, …], of which each rank has a slice of the positions.
class GatheringPositions {
 public:
  GatheringPositions(const at::Tensor& slice, const TensorAxis& axis);
  at::Tensor wait();

 private:
  at::Tensor parts_;  // [ranks, batch, length / ranks, …]
  comm::Work work_;
};

}  // namespace internal

}  // namespace lockstep::nn
