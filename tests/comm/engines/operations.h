// The results that every engine must give.
#pragma once

#include <lockstep/comm/communicator.h>

namespace lockstep::comm::backends {

// Checks every operation, dtype and reduction with sizes 0, 1, odd and large. All ranks call it.
void check_operations(Communicator& group);
// Checks lists of tensors, uneven parts, NaNs, splits, and many calls in flight.
void check_forms(Communicator& group);
void check_splits(Communicator& group);

}  // namespace lockstep::comm::backends
