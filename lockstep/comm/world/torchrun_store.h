// The store of a job that torchrun started: c10d's TCPStore behind our interface.
#pragma once

#include <memory>

#include <lockstep/base/environment.h>
#include <lockstep/store/store.h>

namespace lockstep::comm {

// The address of torchrun's store, and which process hosts it.
struct TorchrunStoreOptions {
  std::string host;
  int port = 0;
  bool hosted_here = false;
};

// Reads the environment that torchrun set: its agent hosts the store
// (TORCHELASTIC_USE_AGENT_STORE), or rank 0 does. UsageError if MASTER_ADDR or MASTER_PORT is
// missing.
TorchrunStoreOptions torchrun_store_options(const LaunchEnvironment& launch);

// Connects, or starts serving if this process hosts the store. CommError (timeout) if nobody
// answers.
//
// Thread-safe: there is one connection, and no request waits on it, because waits poll. Any process
// that reaches the port can read and write this store, because c10d's has no secret; the caller
// warns of that.
std::shared_ptr<store::Store> make_torchrun_store(const TorchrunStoreOptions& options,
                                                  Deadline deadline);

}  // namespace lockstep::comm
