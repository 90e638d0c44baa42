// NCCL, through c10d: for GPUs, one rank each.
//
// Calls run on a stream of the communicator's own, in their order, exchanges included: ranks must
// not rely on an exchange overtaking a collective. wait() orders the current stream and never blocks
// the host.
//
// What NCCL cannot promise (docs/engines.md has the whole list):
//   - Sums come in NCCL's order: within rounding of the canonical one. 16-bit all-reduces travel as
//     float32, because NCCL would round after each hop.
//   - The ledger compares calls beside them: kernels of a mismatched call may have run, on wrong
//     data, before it is found.
//   - The parts of an uneven all_to_all are not compared; where they do not fit, the call ends at its
//     deadline.
#pragma once

#include <memory>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/engines/engine_options.h>

namespace lockstep::comm::engines {

// Uses the current CUDA device. Returns once all ranks are connected.
std::shared_ptr<Communicator> make_nccl(const GroupInfo& group, const EngineOptions& options);

}  // namespace lockstep::comm::engines
