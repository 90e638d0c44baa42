// Any module in numbers.
#pragma once

#include <torch/nn/module.h>

#include <lockstep/parallel/shard/unit_plan.h>
#include <lockstep/plan/model_sizes.h>

namespace lockstep::plan {

// Also of one that a deferred::Construction built without memory for its parameters.
ModelSizes sizes_of(const torch::nn::Module& module, const shard::UnitPolicy& units = {});

}  // namespace lockstep::plan
