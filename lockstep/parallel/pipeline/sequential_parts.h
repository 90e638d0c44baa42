// A torch::nn::Sequential in stages.
#pragma once

#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/cut_blocks.h>
#include <lockstep/parallel/pipeline/schedule/partition.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

struct SequentialCut {
  Balance balance = Balance::parameters;
  at::Tensor sample = {};  // the model's input for a micro-batch; for Balance::time
  Cuts cuts = {};          // where they are given, nothing is balanced
};

struct SequentialParts {
  // This rank's stages: their children, under the names that they have in the whole.
  std::map<int, torch::nn::Sequential> mine;
  Cuts cuts;                        // of all children, the same on every rank
  std::vector<TiedParameter> tied;  // parameters that children of several stages share
};

// Every rank of the group calls it with the same model; rank_of_stage is the schedule's. Children
// that this rank has no stage of are left without memory, also where somebody else still holds
// them: their parameters and buffers are of size 0 from then on. What stages of several ranks share
// is from then on what it is on the first of them.
//
// UsageError, on all ranks and before anything is freed, for more stages than children, cuts that
// are none, and models or cuts that differ between ranks; for a child that has no forward from a
// tensor to a tensor where it is to be measured.
SequentialParts split_sequential(const torch::nn::Sequential& model,
                                 const std::vector<int>& rank_of_stage, comm::Communicator& group,
                                 const SequentialCut& cut = {});

// The children [begin, end) under their names; they are shared.
torch::nn::Sequential children_of(const torch::nn::Sequential& model, int begin, int end);

}  // namespace lockstep::pipeline
