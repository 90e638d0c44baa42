// Every subject, data parallel, in every way in which users spread their batches.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::parity {

void check_data_parallel(ranks::Cells& cells);

}  // namespace lockstep::parity
