// Measures how a module's forward and backward use memory, by running them once.
#pragma once

#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/parallel/shard/unit_plan.h>
#include <lockstep/plan/memory_estimate.h>
#include <lockstep/plan/model_sizes.h>

namespace lockstep::plan {

// Runs `loss`, which computes one micro-batch's loss with the module, and backward() on what it
// returns. What `loss` makes is counted, so let it make its batch, too.
//
// Any module as users write it, on the device where its parameters are, before it is spread over
// ranks. Its gradients and buffers are as before afterwards; generators have moved on.
//
// Failure: UsageError where the module trains nothing or the loss does not depend on it; what
// `loss` throws.
StepTrace trace_step(torch::nn::Module& module, const std::function<at::Tensor()>& loss);

// Estimates each rank's memory for this module, from trace_step() and the module's sizes.
MemoryEstimate estimate_memory(torch::nn::Module& module, const std::function<at::Tensor()>& loss,
                               const MemoryOptions& options, const shard::UnitPolicy& units = {});

// Also of one that a deferred::Construction built without memory for its parameters.
ModelSizes sizes_of(const torch::nn::Module& module, const shard::UnitPolicy& units = {});

}  // namespace lockstep::plan
