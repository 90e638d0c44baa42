// Halves of backward passes of a module that is data parallel: one rank's share of the table.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::pipeline {

void check_data_parallel(ranks::Cells& cells);

}  // namespace lockstep::pipeline
