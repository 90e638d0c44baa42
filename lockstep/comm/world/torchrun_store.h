// The store of a job that torchrun started, as our store: c10d's TCPStore behind our interface.
#pragma once

#include <memory>

#include <lockstep/base/environment.h>
#include <lockstep/store/store.h>

namespace lockstep::comm {

// Where torchrun's store is and who hosts it.
struct TorchrunStoreOptions {
  std::string host;
  int port = 0;
  bool hosted_here = false;
};

// As torchrun says in the environment: its agent hosts the store (TORCHELASTIC_USE_AGENT_STORE), or
// rank 0 does. UsageError where MASTER_ADDR or MASTER_PORT is missing.
TorchrunStoreOptions torchrun_store_options(const LaunchEnvironment& launch);

// Connects, or starts serving where it is hosted here. CommError (timeout) where nobody answers.
//
// Thread-safe: one connection, and nobody waits on it: waits poll. Any process that reaches the
// port can read and write this store, because c10d's has no secret; whoever makes one warns of
// that.
std::shared_ptr<store::Store> make_torchrun_store(const TorchrunStoreOptions& options,
                                                  Deadline deadline);

}  // namespace lockstep::comm
