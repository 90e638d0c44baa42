// Along the reduction tree itself: partial results go up to rank 0, the result comes down.
#pragma once

#include <lockstep/comm/algorithms/collectives.h>

namespace lockstep::comm::tree {

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data);
void broadcast(Transport& transport, Bytes data, int root);

}  // namespace lockstep::comm::tree
