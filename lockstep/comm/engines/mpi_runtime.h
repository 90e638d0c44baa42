// MPI as this process has it: initialised once, used by one thread at a time.
//
// MPI itself is process-wide state, so what stands around it is too: this is the one place.
#pragma once

#include <mpi.h>

#include <mutex>
#include <string>

namespace lockstep::comm::engines {

// Initialises MPI where the program has not, and finalises it at exit in that case. UsageError where the program has initialised it for one thread only, or was not
// started by mpirun.
void require_mpi();

// Held around every MPI call that returns at once.
std::unique_lock<std::mutex> mpi_turn();
// Held around those that wait for other ranks (making groups). Keeps nobody else out where MPI takes
// calls from several threads; where it does not, the others wait too.
std::unique_lock<std::mutex> mpi_long_turn();

// Requests were abandoned whose memory MPI may still write to: the process can go on, but MPI cannot
// be finalised any more.
void abandon_mpi();

// Throws std::runtime_error with MPI's text where `code` is not MPI_SUCCESS.
void check_mpi(int code, const char* what);

}  // namespace lockstep::comm::engines
