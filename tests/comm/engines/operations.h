// What every engine must compute, whatever it is made of.
#pragma once

#include <lockstep/comm/communicator.h>

namespace lockstep::comm::backends {

// Every operation, dtype and reduction with sizes 0, 1, odd and large. Called by all ranks.
void check_operations(Communicator& group);
// Lists of tensors, uneven parts, NaNs, splits, many calls in flight.
void check_forms(Communicator& group);
void check_splits(Communicator& group);

}  // namespace lockstep::comm::backends
