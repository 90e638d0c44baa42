// A manager of ranks that have stages of a model.
#pragma once

#include <lockstep/distributed/distributed.h>

#include <tests/ranks/cells.h>

namespace lockstep {

void check_stages_manager(DistributedManager dist, ranks::Cells& cells);

}  // namespace lockstep
