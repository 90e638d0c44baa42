// The job's store as c10d wants it.
#pragma once

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/store/store.h>

namespace lockstep::comm::engines {

// All keys get the prefix. Removes the keys it set, all clones' together, when the last of them
// goes. Thread-safe.
c10::intrusive_ptr<c10d::Store> make_c10d_store(std::shared_ptr<store::Store> store,
                                                std::string prefix, milliseconds timeout);

}  // namespace lockstep::comm::engines
