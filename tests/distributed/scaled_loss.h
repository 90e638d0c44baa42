// Training with a scaled loss, for everything that may be cut among ranks.
#pragma once

#include <lockstep/distributed/distributed.h>

#include <tests/ranks/cells.h>

namespace lockstep {

void check_scaled_loss(DistributedManager dist, ranks::Cells& cells);

}  // namespace lockstep
