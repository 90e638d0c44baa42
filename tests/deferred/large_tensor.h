#pragma once

#include <torch/types.h>

namespace lockstep::deferred::testing {

// 160 kB, which is large enough to be deferred.
inline at::Tensor large() { return torch::randn({200, 200}); }

}  // namespace lockstep::deferred::testing
