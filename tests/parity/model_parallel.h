// Language models over pipeline, tensor and context axes, against one process.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::parity {

void check_model_parallel(ranks::Cells& cells);

}  // namespace lockstep::parity
