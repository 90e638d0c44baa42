// Everything that a program may ask of a DistributedManager.
#pragma once

#include <lockstep/distributed/distributed.h>

#include <tests/ranks/cells.h>

namespace lockstep {

void check_manager(DistributedManager dist, ranks::Cells& cells);

}  // namespace lockstep
