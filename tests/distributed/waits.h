// Ranks that wait for each other in calls of different groups: all of them get an error while they
// wait.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep {

void check_waits(ranks::Cells& cells);

}  // namespace lockstep
