// How ranks that mpirun has started find the job's store: rank 0 says over MPI where it is, and the
// secret that opens it.
#pragma once

#include <memory>
#include <optional>

#include <lockstep/base/deadline.h>
#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>

namespace lockstep::comm::engines {

struct BootstrapInfo {
  net::Address store;
  net::Secret secret;
};

// Collective over MPI_COMM_WORLD: what rank 0 passes is returned on every rank; what others pass is
// not looked at. UsageError where rank 0 passes nothing; CommError (timeout) at the deadline.
BootstrapInfo exchange_over_mpi(const std::optional<BootstrapInfo>& mine, const Deadline& deadline);

// The rank and number of ranks that mpirun gave this process.
struct MpiWorld {
  int rank = 0;
  int size = 1;
};
MpiWorld mpi_world();

}  // namespace lockstep::comm::engines
