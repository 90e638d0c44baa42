// Every kind of call that a rank can be in when something happens, by name.
#pragma once

#include <vector>

#include "processes.h"

namespace lockstep::comm::faults {

struct Collective {
  Operation operation;
  Algorithm algorithm;
  std::size_t count;  // of float32, for each rank

  std::string name() const;
};

// Each operation with each of its algorithms, short and long.
std::vector<Collective> every_collective();

// Makes the call, with data that depends on the rank and `round`; returns a hash of the result.
std::uint32_t run(Rank& rank, const Collective& collective, int round, milliseconds timeout);

// The same for a call that is described by its fingerprint (float32 or whatever it says).
void run(Rank& rank, const Fingerprint& call, milliseconds timeout);

}  // namespace lockstep::comm::faults
