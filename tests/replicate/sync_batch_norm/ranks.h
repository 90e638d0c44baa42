// Compares batch norms over several ranks with LibTorch's over the whole batch.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::replicate {

void check_batch_norms(ranks::Cells& cells);

// Runs in a process in which nothing has been converted yet.
void check_key(ranks::Cells& cells);

}  // namespace lockstep::replicate
