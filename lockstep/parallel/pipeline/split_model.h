// A model in stages: any model that lists its blocks, or a torch::nn::Sequential.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/model_blocks.h>
#include <lockstep/parallel/pipeline/schedule/partition.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

// Any torch::nn::Module whose forward is a row of blocks. Modules before the equal layers, such as
// embeddings, and behind them, such as a last norm and a head, are blocks as well: one block of
// several modules, several blocks, or none.
//
//   auto blocks = blocks_of<Layer>(*net->layers);
//   blocks.insert(blocks.begin(), {{net->tokens.ptr()}, [net](const auto& x) { … }});
//   blocks.push_back({{net->norm.ptr(), net->head.ptr()}, [net](const auto& x) { … }});
struct ListedModel {
  std::shared_ptr<torch::nn::Module> model;
  std::vector<ModelBlock> blocks;  // in the order of forward
  // Makes the inputs of the first block for a micro-batch. Called on the rank that has that block.
  std::function<std::vector<at::Tensor>(int micro_batch)> input;
  // Computes the loss, one number, summed over the micro-batch, from the outputs of the last block.
  // Called on the rank that has that block.
  std::function<at::Tensor(int micro_batch, const std::vector<at::Tensor>& outputs)> loss;
};

struct ModelStages {
  std::map<int, Stage> mine;        // this rank's stages, for a Pipeline
  std::vector<TiedParameter> tied;  // for PipelineOptions::tied
  Cuts cuts;                        // of all blocks, the same on every rank
};

// Every rank of the group calls it with the same model; rank_of_stage is the schedule's. The model
// keeps this rank's modules, under their names, and these are moved to `device`; modules that only
// other ranks' blocks list are unregistered and left without memory. So the model's
// named_parameters() are this rank's part of the whole, for optimizers, clipping and checkpoints
// (DistributedManager::wrap_model).
//
// A parameter that blocks of several stages list has one value, the one of the first of these
// stages, and one gradient. The same holds for a parameter that no block lists, which every rank
// keeps: a table that all blocks look at, or a parameter of the model itself.
//
// Balance::time measures micro-batch 0 on the group's first rank, which needs the input for that,
// on the device that the model is on.
//
// UsageError, on all ranks and before anything is freed, for more stages than blocks, cuts that do
// not fit, modules that are not registered in the model, and anything that differs between ranks.
ModelStages split_model(const ListedModel& model, const std::vector<int>& rank_of_stage,
                        comm::Communicator& group, const BlockCut& cut = {},
                        c10::Device device = at::kCPU);

struct SequentialCut {
  Balance balance = Balance::parameters;
  at::Tensor sample = {};  // the model's input for a micro-batch; for Balance::time
  Cuts cuts = {};          // if they are given, nothing is balanced
};

struct SequentialParts {
  // This rank's stages, with their children under the names that they have in the whole model.
  std::map<int, torch::nn::Sequential> mine;
  Cuts cuts;                        // of all children, the same on every rank
  std::vector<TiedParameter> tied;  // the parameters that children of several stages share
};

// Every rank of the group calls it with the same model; rank_of_stage is the schedule's. Children
// of other ranks' stages are left without memory, even if somebody else still holds them: their
// parameters and buffers then have size 0. Tensors that stages of several ranks share get the
// values that they have on the first of these ranks.
//
// UsageError, on all ranks and before anything is freed, for more stages than children, cuts that
// do not fit, and models or cuts that differ between ranks; and, for Balance::time, for a child
// whose forward does not make a tensor of a tensor.
SequentialParts split_sequential(const torch::nn::Sequential& model,
                                 const std::vector<int>& rank_of_stage, comm::Communicator& group,
                                 const SequentialCut& cut = {});

// The children [begin, end) under their names, shared with the model.
torch::nn::Sequential children_of(const torch::nn::Sequential& model, int begin, int end);

}  // namespace lockstep::pipeline
