// What an optimizer asks other ranks where its parameters are parts of larger ones.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/optim/parameter.h>

namespace lockstep::optim {

// This rank's parts of parameters that are cut among ranks, in row-major order. Every rank that has
// parts of the same parameters calls the same functions with the same names in the same order.
class Parts {
 public:
  virtual ~Parts() = default;

  // Each of `parts` is this rank's part of a tensor that is cut as the parameter of that name is.
  // The sum of squares of each of those whole tensors, over fixed blocks (sum_of_squares.h), so
  // that its bits do not depend on where the parts are cut.
  virtual std::vector<double> sums_of_squares(const std::vector<NamedTensor>& parts) = 0;
};

// The same for parameters that are whole on this rank.
std::vector<double> sums_of_squares_of_whole(const std::vector<NamedTensor>& tensors);

}  // namespace lockstep::optim
