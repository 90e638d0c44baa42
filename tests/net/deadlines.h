// Deadlines of the tests.
#pragma once

#include <lockstep/base/deadline.h>

namespace lockstep::net {

// Long enough for a busy machine; it is only reached if something hangs.
inline Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }
inline Deadline in(int ms) { return Deadline::after(milliseconds(ms)); }

}  // namespace lockstep::net
