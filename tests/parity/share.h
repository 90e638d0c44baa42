// How much of a table runs.
#pragma once

namespace lockstep::parity {

// How much of a table runs.
enum class Share {
  everyday,  // as much as CI has time for
  few,       // a third of everyday
  whole,     // every cell
};

}  // namespace lockstep::parity
