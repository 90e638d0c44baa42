// How a process joins its job: from what its launcher left in the environment to a communicator
// over all ranks.
#pragma once

#include <memory>
#include <string>

#include <c10/core/Device.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

struct JoinOptions {
  // A name in the table of backends (backends/table.h), or "auto": shared memory inside a host and
  // TCP between hosts, and tensors on GPUs by NCCL where every rank has a GPU of its own, else
  // through the host's memory. "nccl": the same, but an error where NCCL cannot be used.
  std::string backend = "auto";
  // Where this rank's tensors are. A GPU is the thread's current device, too.
  c10::Device device = c10::DeviceType::CPU;
  // How long joining, and any call that says nothing else, may take.
  milliseconds timeout{600'000};
  // The algorithm of calls that ask for none; our own transports only.
  Algorithm algorithm = Algorithm::automatic;
  // The address to listen on; empty: the one this host uses to reach the job's store.
  std::string bind_host;
};

// Joins the job this process was launched into by lockstep run, torchrun, mpirun or srun; a process
// nobody launched is a world of one. Every rank calls it with the same options. Also gives log
// lines their rank.
//
// UsageError where the environment is incomplete or the backend unknown; CommError (timeout) naming
// the ranks that did not come.
std::shared_ptr<Communicator> join_world(const JoinOptions& options = {});

// One line for the beginning of a run: what the ranks of a world talk over, why, and whether sums
// have the same bits in every layout.
std::string describe(const Communicator& world);

}  // namespace lockstep::comm
