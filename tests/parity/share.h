// How much of a table is run.
#pragma once

namespace lockstep::parity {

// What CI has time for, a third of that, and all of it.
enum class Share { everyday, few, whole };

}  // namespace lockstep::parity
