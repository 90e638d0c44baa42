// The properties that the ranks of a job check.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::nn {

void check_parity(ranks::Cells& cells);
void check_module(ranks::Cells& cells);
void check_context_memory(ranks::Cells& cells);
void check_context_mistakes(ranks::Cells& cells);
void check_context_gpu(ranks::Cells& cells);

}  // namespace lockstep::nn
