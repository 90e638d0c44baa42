// All kinds of calls in which a rank can be when something happens, by name.
#pragma once

#include <vector>

#include "processes.h"

namespace lockstep::comm::faults {

struct Collective {
  Operation operation;
  Algorithm algorithm;
  std::size_t count;  // float32 elements for each rank

  std::string name() const;
};

// Each operation with each of its algorithms, short and long.
std::vector<Collective> every_collective();

// Makes the call, with data that depends on the rank and `round`; returns a hash of the result.
std::uint32_t run(Rank& rank, const Collective& collective, int round, milliseconds timeout);

// The same for a call given by its fingerprint (with float32 or the dtype that it names).
void run(Rank& rank, const Fingerprint& call, milliseconds timeout);

}  // namespace lockstep::comm::faults
