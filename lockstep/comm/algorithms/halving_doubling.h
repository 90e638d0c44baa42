// Recursive halving, then doubling: partners at distance 1, 2, 4, … swap halves of what they hold.
// Any number of ranks: they form blocks of powers of two, largest first, and smaller blocks add
// into larger ones, which is exactly the reduction tree.
#pragma once

#include <lockstep/comm/algorithms/collectives.h>

namespace lockstep::comm::halving_doubling {

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data);

}  // namespace lockstep::comm::halving_doubling
