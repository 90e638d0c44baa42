// Open MPI, for clusters where it is the way to the network (UCX and others). Tensors in host
// memory.
//
// MPI cannot promise some things (docs/engines.md has the whole list):
//   - Sums come in MPI's order: within rounding of the canonical one.
//   - A call cannot be cancelled. After a failure every Work throws, but MPI may go on writing to
//     the tensors of calls that were in flight (they are kept for that), and MPI cannot be
//     finalised: the process should end, and mpirun ends the others.
//   - A rank that dies ends the whole job: that is mpirun's rule.
//   - The ledger compares calls beside them: a mismatch is found some milliseconds later.
#pragma once

#include <memory>
#include <optional>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/backends/engine/engine_group.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>

namespace lockstep::comm::backends {

// Ranks that mpirun has started need this to find the job's store: its address and its secret,
// which rank 0 sends them over MPI.
struct BootstrapInfo {
  net::Address store;
  net::Secret secret;
};

// Collective over MPI_COMM_WORLD: every rank gets what rank 0 passes; what other ranks pass is
// ignored. UsageError if rank 0 passes nothing; CommError (timeout) at the deadline.
BootstrapInfo exchange_over_mpi(const std::optional<BootstrapInfo>& mine, const Deadline& deadline);

// The rank and number of ranks that mpirun gave this process.
struct MpiWorld {
  int rank = 0;
  int size = 1;
};
MpiWorld mpi_world();

// The group's global ranks are those of MPI_COMM_WORLD. If options.store is null, the group's rank
// 0 hosts a store for the ledger, bound to options.bind_address; all of MPI_COMM_WORLD must be in
// the group then.
std::shared_ptr<Communicator> make_mpi(const GroupInfo& group, const EngineOptions& options);

}  // namespace lockstep::comm::backends
