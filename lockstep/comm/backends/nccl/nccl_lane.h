// Carries the tensors on GPUs of a group over our own transports: a lane that calls NCCL directly.
//
// Calls run on a stream of the lane's own, in their order, exchanges included: ranks must not rely
// on an exchange overtaking a collective. wait() orders the current stream and never blocks the
// host.
//
// NCCL cannot promise some things (docs/engines.md has the whole list):
//   - Sums come in NCCL's order: within rounding of the canonical one. 16-bit all-reduces travel as
//     float32, because NCCL would round after each hop.
//   - Calls are compared beside them: kernels of a mismatched call may have run, on wrong data,
//     before it is found.
//   - NCCL connects two ranks in the first call that needs it, and waits for the other rank there.
//     So a thread of the lane makes such calls, and Work::wait() waits for that thread.
#pragma once

#include <string>

#include <c10/core/Device.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/device_lane.h>

namespace lockstep::comm::backends {

// Makes lanes on that GPU. UsageError if this process has no NCCL, or one older than 2.19.
MakeLane nccl_lanes(c10::Device device);

// Connects NCCL on the current device, as a group of one, and adds something up. Throws NCCL's or
// CUDA's error.
void try_nccl(const Deadline& deadline);

// Identifies a GPU among all GPUs of the job by its host and its place there. Empty if the device
// is no GPU, or if NCCL cannot be used.
std::string gpu_identity(c10::Device device);

}  // namespace lockstep::comm::backends
