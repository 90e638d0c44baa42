// Every subject, sharded in every way, compared with one process that adds in the canonical order.
// Data parallelism without shards has the same results to the bit.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::parity {

void check_sharded(ranks::Cells& cells);
// The share of the table that runs every day: all of it on one and two ranks, where it takes
// seconds, and the cells in which the strategies differ most on more ranks.
void check_some_sharded(ranks::Cells& cells);
// A third of that share.
void check_few_sharded(ranks::Cells& cells);
// The same with everything on a GPU that all ranks share.
void check_sharded_on_gpu(ranks::Cells& cells);

}  // namespace lockstep::parity
