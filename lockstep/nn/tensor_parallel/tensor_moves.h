// What goes between the ranks of a tensor axis: operations that autograd follows, in pairs of which
// each is the other's backward.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/nn/tensor_parallel/tensor_axis.h>

namespace lockstep::nn {

// Each rank has an equal part of what is cut, in the order of ranks, unless said otherwise;
// UsageError, with the numbers, where that cannot be. Every rank calls them with the same shapes,
// and runs backward at the same point.

// From what each rank has between layers to what each needs for a product of its own: all of x.
// Backward sums what the ranks' products want of it.
at::Tensor enter_products(const at::Tensor& x, const TensorAxis& axis);
// The reverse, of partial sums: their sum over the ranks, as it lies between layers.
at::Tensor leave_products(const at::Tensor& x, const TensorAxis& axis);

// All ranks' parts along the last dim, one after the other, on every rank; and this rank's part of
// what all have. Parts to gather may be of different widths. What follows is computed alike on
// every rank.
at::Tensor gather_features(const at::Tensor& x, const TensorAxis& axis);
at::Tensor take_features(const at::Tensor& x, const TensorAxis& axis);

// The same along any dim, of equal parts.
at::Tensor gather_parts(const at::Tensor& x, std::int64_t dim, const TensorAxis& axis);
at::Tensor take_part(const at::Tensor& x, std::int64_t dim, const TensorAxis& axis);

// From now on every gradient that comes for a parameter is summed over the group first: for one
// that each rank has whole and uses for a part of the work. One that is frozen may be thawed later.
void sum_gradients_over(const at::Tensor& parameter, std::shared_ptr<comm::Communicator> group);

namespace internal {

// Without autograd. What is under way: `result` is there once wait() returned.
class Moving {
 public:
  Moving(at::Tensor result, comm::Work work) : result_(std::move(result)), work_(std::move(work)) {}

  at::Tensor wait() {
    work_.wait();
    return std::move(result_);
  }

 private:
  at::Tensor result_;
  comm::Work work_;
};

// The sum over ranks of what their products want of x, as x lies between layers. `partial` is a
// contiguous tensor of the caller's own, and is not to be touched until then.
Moving start_sum(at::Tensor partial, const TensorAxis& axis);

// All of x [batch, length, …], of which each rank has a slice of the positions.
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
