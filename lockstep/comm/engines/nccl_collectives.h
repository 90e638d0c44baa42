// The operations of a Communicator in terms of NCCL's.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <lockstep/comm/call.h>
#include <lockstep/comm/engines/nccl_library.h>

namespace lockstep::comm::engines {

// Puts a call on a stream, which is the current one. Throws NcclError.
void enqueue_collective(NcclComm& comm, const Call& call, int num_ranks,
                        const c10::cuda::CUDAStream& stream);

}  // namespace lockstep::comm::engines
