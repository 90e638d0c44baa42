// A manager of ranks that share layers.
#pragma once

#include <lockstep/distributed/distributed.h>

#include <tests/ranks/cells.h>

namespace lockstep {

void check_tensor_manager(DistributedManager dist, ranks::Cells& cells);

}  // namespace lockstep
