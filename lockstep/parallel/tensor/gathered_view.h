// A view of a tensor that is cut, where it had to be a copy: a view in LibTorch's sense changes
// with what it is of, and this does not.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace lockstep::tensor {

// From now on whoever writes to `view`, or uses it after the tensor was written to of which `part`
// is this rank's part, gets a UsageError.
void guard_view(const at::Tensor& view, const at::Tensor& part, const std::string& op);

}  // namespace lockstep::tensor
