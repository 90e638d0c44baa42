// Our kernels have a first derivative and no second.
#pragma once

#include <ATen/core/grad_mode.h>
#include <lockstep/base/error.h>

namespace lockstep::intercept {

// Called by a backward before it does anything: autograd records what a backward does only when
// asked for the gradient of a gradient, and would get a silent zero from a kernel of ours.
inline void refuse_double_backward(const char* function) {
  if (at::GradMode::is_enabled())
    throw UsageError(
        "lockstep::nn::{} has no second derivative, and backward was called with create_graph: "
        "call "
        "it without, or compose the function of ATen's operators where gradients of gradients are "
        "needed",
        function);
}

}  // namespace lockstep::intercept
