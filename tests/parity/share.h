// How much of a table is run.
#pragma once

namespace lockstep::parity {

// How much of a table runs.
enum class Share {
  everyday,  // what CI has time for
  few,       // a third of that
  whole,     // every cell
};

}  // namespace lockstep::parity
