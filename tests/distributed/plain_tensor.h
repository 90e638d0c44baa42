// The table of plain torch::nn models whose layers a plan cuts over a tensor axis, with every
// strategy along the axis of the data.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep {

void check_plain_tensor(ranks::Cells& cells);

}  // namespace lockstep
