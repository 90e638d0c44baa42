// What programs do to models, with every strategy: it must mean the same, or be refused.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep {

void check_every_strategy(ranks::Cells& cells);

}  // namespace lockstep
