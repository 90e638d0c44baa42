// What GPUs can compute at most, by their makers' sheets.
#pragma once

#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

namespace lockstep::device {

// Floating-point operations a second of matrix products of dense matrices of this type, summed in
// float32. Nothing for a device that is not in the table: a share of a wrong peak misleads.
std::optional<double> peak_flops(const std::string& device_name, c10::ScalarType type);

}  // namespace lockstep::device
