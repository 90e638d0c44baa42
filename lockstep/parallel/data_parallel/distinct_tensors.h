// A module's tensors, each once: weights may be shared.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/mesh/tensors.h>

namespace lockstep::data_parallel {

// Of named_parameters() or named_buffers(), under the first name each has.
std::vector<NamedTensor> distinct_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& tensors);

// The parameters that require a gradient.
std::vector<NamedTensor> trained_parameters(const torch::nn::Module& module);

}  // namespace lockstep::data_parallel
