// Tensors by name: a model's parameters, an optimizer's state.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/mesh/tensors.h>

namespace lockstep::optim {

// Shares its storage and its gradient with the model.
using NamedParameter = NamedTensor;

// UsageError where a tensor is undefined, a name stands for two parameters, or one parameter stands
// under two names, as shared weights do in torch::nn::Module::named_parameters().
void check_distinct(const std::vector<NamedParameter>& parameters);

// The gradient that backward left in `.grad()`; undefined if backward did not reach the parameter.
// UsageError for a gradient that is sparse, not of the parameter's shape, type and device, or cut
// among ranks so that it has no memory here.
at::Tensor gradient_of(const NamedParameter& parameter);

// "Float [3, 4]", for messages.
std::string type_and_shape(const at::Tensor& tensor);

}  // namespace lockstep::optim
