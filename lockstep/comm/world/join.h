// How a process joins its job: from its launcher's environment variables to a communicator over all
// ranks.
#pragma once

#include <memory>
#include <string>

#include <c10/core/Device.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

struct JoinOptions {
  // A name in the table of backends (backends/table.h), or "auto": shared memory inside a host and
  // TCP between hosts; tensors on GPUs use NCCL if every rank has a GPU of its own, otherwise they
  // go through the host's memory. "nccl" is the same, but an error if NCCL cannot be used.
  std::string backend = "auto";
  // The device of this rank's tensors. A GPU also becomes the thread's current device.
  c10::Device device = c10::DeviceType::CPU;
  // How long joining may take, and any call without a timeout of its own.
  milliseconds timeout{600'000};
  // The algorithm of calls that ask for none; used only by our own transports.
  Algorithm algorithm = Algorithm::automatic;
  // The address to listen on; if empty, the address that this host uses to reach the job's store.
  std::string bind_host;
};

// UsageError if the environment is incomplete or the backend unknown; CommError (timeout) naming
// the ranks that did not come.
std::shared_ptr<Communicator> join_world(const JoinOptions& options = {});

// Describes in one line, for the beginning of a run, which backend the ranks of a world use, why,
// and whether sums have the same bits in every layout.
std::string describe(const Communicator& world);

}  // namespace lockstep::comm
