// LibTorch's element types and ours.
#pragma once

#include <c10/core/ScalarType.h>

#include <lockstep/comm/types.h>

namespace lockstep::comm {

// UsageError that lists the supported ones where there is none of ours.
DType dtype_of(c10::ScalarType type);

c10::ScalarType scalar_type_of(DType dtype);

}  // namespace lockstep::comm
