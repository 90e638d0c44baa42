// Memory of the host that a device copies to and from while both go on with other work.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::device {

// A flat tensor in the host's memory, as large as asked for and no larger (LibTorch's own pinned
// memory is rounded up to a power of two). Pinned where `device` is a GPU; otherwise any memory.
// UsageError, with the numbers, where the host has no more to pin.
at::Tensor host_memory(std::int64_t elements, at::ScalarType type, c10::Device device);

// Returns once the device has done all it was given by this thread so far.
void wait_for(c10::Device device);

}  // namespace lockstep::device
