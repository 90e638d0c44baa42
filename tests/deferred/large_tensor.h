#pragma once

#include <torch/types.h>

namespace lockstep::deferred::testing {

// Of 160 kB: large enough to be deferred.
inline at::Tensor large() { return torch::randn({200, 200}); }

}  // namespace lockstep::deferred::testing
