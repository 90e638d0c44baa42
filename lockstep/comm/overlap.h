// Memory that one call would write twice, or read and write: what is in it afterwards would depend
// on who comes first. Found before anything is sent.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/types.h>

namespace lockstep::comm {

// Which output may be exactly one input: what a rank has already where the result wants it.
struct SamePlace {
  std::size_t output = 0;
  std::size_t input = 0;
};

// UsageError where outputs overlap each other, or an input. Inputs may overlap each other.
void check_overlap(Operation operation, const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs, std::optional<SamePlace> same = {});

// UsageError where `part` overlaps `whole` other than exactly as its part number `rank`.
void check_part(Operation operation, const at::Tensor& whole, const at::Tensor& part, int rank);

}  // namespace lockstep::comm
