// The stages of a model.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::pipeline {

// A part of a model that one rank holds, between the part before it and the one after.
struct Stage {
  // Computes the stage's output for a micro-batch from the output of the stage before: any number
  // of tensors of any shapes, the same for every micro-batch of a kind (Pipeline::expect_kinds).
  // The first stage gets no inputs and reads its data itself; the last returns one number, the loss
  // summed over the micro-batch.
  std::function<std::vector<at::Tensor>(int micro_batch, const std::vector<at::Tensor>& inputs)>
      forward;
  // The parameters that are trained.
  std::vector<at::Tensor> parameters;
};

// A parameter that stages on different ranks share: one logical weight, whose gradient is their
// sum.
struct TiedParameter {
  std::vector<int> stages;  // the stages that have it
  at::Tensor mine;          // undefined on a rank that has none of these stages
};

struct PipelineOptions {
  c10::Device device = at::kCPU;
  std::vector<TiedParameter> tied = {};  // the same list on every rank, except `mine`
};

}  // namespace lockstep::pipeline
