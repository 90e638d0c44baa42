// Halves of backward passes of a data-parallel module: one rank's part of the table.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::pipeline {

void check_data_parallel(ranks::Cells& cells);

}  // namespace lockstep::pipeline
