// What data parallelism does besides giving the right numbers: errors, hooks, the order it learns.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::replicate {

void check_behaviour(ranks::Cells& cells);

// Ends the group.
void check_refusal(ranks::Cells& cells);

}  // namespace lockstep::replicate
