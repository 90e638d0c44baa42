// LibTorch's element types and safetensors'.
#pragma once

#include <optional>

#include <c10/core/ScalarType.h>

#include <lockstep/checkpoint/safetensors/dtype.h>

namespace lockstep::checkpoint {

// Nothing where the other side has no such type, or not in this version of LibTorch.
std::optional<DType> dtype_of(c10::ScalarType type);
std::optional<c10::ScalarType> scalar_type_of(DType dtype);

}  // namespace lockstep::checkpoint
