// Which rank of a pipeline has which blocks of a model, and which tensors they share.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/model_block.h>
#include <lockstep/parallel/pipeline/schedule/partition.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

enum class Balance : std::uint8_t {
  parameters,  // by their number
  time,        // by what forward and backward of a sample take, on the group's first rank
};

struct BlockCut {
  Balance balance = Balance::parameters;
  Cuts cuts = {};  // where they are given, nothing is balanced
};

using StageTensors = std::vector<std::vector<at::Tensor>>;  // parameters and buffers of each stage

struct CutBlocks {
  Cuts cuts;                        // the same on every rank
  StageTensors tensors;             // those in no block are every stage's
  std::vector<TiedParameter> tied;  // parameters that several stages share
};

struct CutRequest {
  const torch::nn::Module& model;
  const std::vector<ModelBlock>& blocks;
  std::function<std::vector<at::Tensor>()> sample;  // for Balance::time
  const std::vector<int>& rank_of_stage;            // the schedule's
  BlockCut cut;
  std::string fault = {};  // that the caller knows of
};

// Every rank of the group calls it with the same. What stages of several ranks share is from then
// on what it is on the first of them; tensors that are other ranks' alone are left without memory.
//
// UsageError, on all ranks and before anything is freed, for more stages than blocks, cuts that are
// none, modules that are not the model's, and what differs between ranks.
CutBlocks cut_blocks(const CutRequest& request, comm::Communicator& group);

}  // namespace lockstep::pipeline
