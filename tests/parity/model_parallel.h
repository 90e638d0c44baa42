// Language models over pipeline, tensor and context axes, compared with one process.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::parity {

// The cells that CI runs, and all cells.
void check_some_model_parallel(ranks::Cells& cells);
void check_model_parallel(ranks::Cells& cells);
// The same on a GPU that the ranks share, also in 16 bits.
void check_some_model_parallel_on_gpu(ranks::Cells& cells);
void check_model_parallel_on_gpu(ranks::Cells& cells);

}  // namespace lockstep::parity
