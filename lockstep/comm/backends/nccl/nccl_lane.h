// NCCL, called directly, as the lane of the tensors on GPUs of a group over our own transports.
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
//   - Connections between two ranks are made in the first call that needs them, where NCCL waits
//     for the other rank. So a thread of the lane's makes such calls, and Work::wait() waits for
//     it.
#pragma once

#include <string>

#include <c10/core/Device.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/device_lane.h>

namespace lockstep::comm::backends {

// Lanes on that GPU. UsageError where this process has no NCCL, or one older than 2.19.
MakeLane nccl_lanes(c10::Device device);

// Connects NCCL on the current device, alone, and adds something up; throws what is wrong with it.
void try_nccl(const Deadline& deadline);

// A GPU's host and its place there, by which NCCL tells it apart from every other GPU of the job.
// The text is empty where the device is no GPU, or where NCCL cannot be used.
std::string gpu_identity(c10::Device device);

}  // namespace lockstep::comm::backends
