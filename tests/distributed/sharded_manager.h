// A user's program with a model that is cut among ranks.
#pragma once

#include <lockstep/distributed/distributed.h>

#include <tests/ranks/cells.h>

namespace lockstep {

void check_sharded_manager(DistributedManager dist, ranks::Cells& cells);

}  // namespace lockstep
