// Every subject, sharded in every way, against one process that adds in the canonical order: what
// data parallelism without shards gives to the bit.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::parity {

void check_sharded(ranks::Cells& cells);
// A share of it for every day: all of it on one and two ranks, where it takes seconds, and on more
// of them what differs most between the strategies.
void check_some_sharded(ranks::Cells& cells);
// A third of that.
void check_few_sharded(ranks::Cells& cells);
// The same with everything on a GPU, which all ranks share.
void check_sharded_on_gpu(ranks::Cells& cells);

}  // namespace lockstep::parity
