// Ranks that wait for each other in calls of different groups: found while they wait, on all ranks.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep {

void check_waits(ranks::Cells& cells);

}  // namespace lockstep
