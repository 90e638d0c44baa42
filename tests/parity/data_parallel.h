// Every subject under data parallelism, with batches spread in every way that users do.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::parity {

void check_data_parallel(ranks::Cells& cells);

}  // namespace lockstep::parity
