// What an engine needs to start, beside the group it is for.
#pragma once

#include <memory>
#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/store/store.h>

namespace lockstep::comm::engines {

// A timeout for engines that cannot do without one: deadlines are kept by us.
inline constexpr milliseconds kNever = std::chrono::hours(24 * 365);

// When the ledger compares a call between ranks (see ledger.h).
enum class LedgerMode : std::uint8_t {
  automatic,  // what the engine needs: before for gloo, beside for mpi
  before,     // a rank takes part in a call only after comparing it: no wrong number is ever made,
              // at the price of one round to the store
  beside,     // in the background: costs the call nothing; a mismatch is found some milliseconds
              // later and thrown by this call's Work or by a later call
};

struct EngineOptions {
  // The job's store: where engines find each other and the ledger is kept. Only mpi does without:
  // its rank 0 then hosts one.
  std::shared_ptr<store::Store> store;
  // How long setting up, and any call that says nothing else, may take.
  milliseconds timeout{300'000};
  // The address of this host that the engine's listeners bind to (gloo; mpi's own store).
  std::string bind_address = "127.0.0.1";
  LedgerMode ledger = LedgerMode::automatic;
};

}  // namespace lockstep::comm::engines
