// Compares estimates with the memory that ranks hold when they train.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::plan::testing {

void check_peaks(ranks::Cells& cells);
// The same with everything on one GPU, which the ranks share.
void check_peaks_on_gpu(ranks::Cells& cells);

}  // namespace lockstep::plan::testing
