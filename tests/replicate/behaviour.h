// The properties of data parallelism besides its numbers: errors, hooks, the order that it learns.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::replicate {

void check_behaviour(ranks::Cells& cells);

// This one ends the group.
void check_refusal(ranks::Cells& cells);

}  // namespace lockstep::replicate
