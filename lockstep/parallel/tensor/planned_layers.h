// Which layers of a model a plan cuts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/parallel/tensor/parallelize_module.h>

namespace lockstep::tensor {

// A parameter of a layer that is cut.
struct PlannedParameter {
  std::string name;
  at::Tensor tensor;
  std::int64_t dim;
};

struct PlannedLayer {
  std::string name;
  torch::nn::Module* module;
  const PlannedCut* planned;
  std::vector<PlannedParameter> parameters;
};

const char* name_of(Cut cut);  // "columns", "rows"

// UsageError, with the numbers, for whatever of the plan does not suit the model or the group.
std::vector<PlannedLayer> checked_layers(torch::nn::Module& model, const Plan& plan,
                                         const comm::Communicator& group);

}  // namespace lockstep::tensor
