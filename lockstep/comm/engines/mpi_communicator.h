// Open MPI, for clusters where it is the way to the network (UCX and others). Tensors in host
// memory.
//
// What MPI cannot promise (docs/engines.md has the whole list):
//   - Sums come in MPI's order: within rounding of the canonical one.
//   - A call cannot be cancelled. After a failure every Work throws, but MPI may go on writing to the
//     tensors of calls that were in flight (they are kept for that), and MPI can not be finalised:
//     the process should end, and mpirun ends the others.
//   - A rank that dies ends the whole job: that is mpirun's rule.
//   - The ledger compares calls beside them: a mismatch is found some milliseconds later.
#pragma once

#include <memory>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/engines/engine_options.h>

namespace lockstep::comm::engines {

// The group's global ranks are those of MPI_COMM_WORLD. Where options.store is null, the group's
// rank 0 hosts a store for the ledger, bound to options.bind_address; all of MPI_COMM_WORLD must be
// in the group then.
std::shared_ptr<Communicator> make_mpi(const GroupInfo& group, const EngineOptions& options);

}  // namespace lockstep::comm::engines
