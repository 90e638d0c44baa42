// A model in parts.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::pipeline {

// A part of a model that one rank holds, between the part before it and the one after.
struct Stage {
  // The stage's output for a micro-batch, from what the stage before gave it: any number of tensors
  // of any shapes, the same for every micro-batch of a kind (Pipeline::expect_kinds). The first
  // stage is given none and takes its own part of the data; the last returns one number, the loss
  // summed over the micro-batch.
  std::function<std::vector<at::Tensor>(int micro_batch, const std::vector<at::Tensor>& inputs)>
      forward;
  // Those that are trained.
  std::vector<at::Tensor> parameters;
};

// Parameters that stages on different ranks share: one logical weight, whose gradient is their sum.
struct TiedParameter {
  std::vector<int> stages;  // which have it
  at::Tensor mine;          // undefined on a rank that has none of them
};

struct PipelineOptions {
  c10::Device device = at::kCPU;
  std::vector<TiedParameter> tied = {};  // the same list on every rank, but for `mine`
};

}  // namespace lockstep::pipeline
