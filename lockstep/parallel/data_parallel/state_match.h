// Does a list of tensors hold the state that is asked for?
#pragma once

#include <map>
#include <string>
#include <vector>

#include <lockstep/mesh/tensors.h>

namespace lockstep::data_parallel {

// What is wrong with it, in a sentence's middle: a name that is missing, or not wanted, or there
// twice, or whose tensor has another shape. Empty where it is all of it, in any order.
std::string state_fault(const std::vector<NamedTensor>& wanted,
                        const std::vector<NamedTensor>& given);

// By name, for lists without a fault.
std::map<std::string, at::Tensor> by_name(const std::vector<NamedTensor>& state);

}  // namespace lockstep::data_parallel
