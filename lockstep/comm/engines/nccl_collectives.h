// The operations of a Communicator in terms of NCCL's.
#pragma once

#include <vector>

#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL  // c10d's header is empty without
#endif
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <lockstep/comm/call.h>

namespace lockstep::comm::engines {

using NcclWork = c10::intrusive_ptr<c10d::Work>;

// Puts a call on the current stream; returns what NCCL made of it, for its errors. Throws what c10d
// throws.
std::vector<NcclWork> enqueue_collective(c10d::Backend& engine, const Call& call, int num_ranks,
                                         c10::Device device);

}  // namespace lockstep::comm::engines
