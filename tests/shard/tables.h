// The properties of sharded data parallelism besides its numbers, which the parity suite checks.
// Each function is the table of a job.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::shard {

// Norms of gradients that are cut at awkward places.
void check_gradient_norm(ranks::Cells& cells);
// Unusual models, and unusual things that programs do with models.
void check_any_module(ranks::Cells& cells);
void check_any_program(ranks::Cells& cells);
// Gradients over several passes, zeroed in every possible way.
void check_accumulation(ranks::Cells& cells);
// Mistakes of the caller, which raise an error on every rank.
void check_mistakes(ranks::Cells& cells);
// Every optimizer, on parts and on whole parameters.
void check_every_optimizer(ranks::Cells& cells);
// The whole state of a model and its optimizer, written and read.
void check_state(ranks::Cells& cells);
// Parameters, gradients and buffers of 16 bits; what a step does with a scaled loss.
void check_precision(ranks::Cells& cells);
// 16 bits, offload and memory, with everything on a GPU that all ranks share.
void check_gpu(ranks::Cells& cells);
// ZeRO++: the bytes that it sends, and its effect on the numbers.
void check_zero_plus_plus(ranks::Cells& cells);
// How much memory is held, and when.
void check_memory(ranks::Cells& cells);
// The units that are gathered, and the moments at which they are.
void check_gathers(ranks::Cells& cells);

// Ranks that run different programs. Each table ends its group, which has a short deadline.
void check_one_rank_more(ranks::Cells& cells);
void check_other_units(ranks::Cells& cells);
void check_other_call(ranks::Cells& cells);
void check_other_pass(ranks::Cells& cells);

}  // namespace lockstep::shard
