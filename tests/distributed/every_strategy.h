// Programs do these things to models, under every strategy: they must have the same effect, or be
// refused.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep {

void check_every_strategy(ranks::Cells& cells);

}  // namespace lockstep
