// How much of a table is run.
#pragma once

namespace lockstep::parity {

// What CI has time for, and all of it.
enum class Share { everyday, whole };

}  // namespace lockstep::parity
