// Batch norms over several ranks against LibTorch's over the whole batch.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::replicate {

void check_batch_norms(ranks::Cells& cells);

// In a process where nothing has been converted yet.
void check_key(ranks::Cells& cells);

}  // namespace lockstep::replicate
