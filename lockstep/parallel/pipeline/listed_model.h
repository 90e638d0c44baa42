// A model that lists its blocks, in stages.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/cut_blocks.h>
#include <lockstep/parallel/pipeline/model_block.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

// Any torch::nn::Module whose forward is a row of blocks. What stands before those that are alike,
// as embeddings, and what stands behind them, as a last norm and a head, are blocks as well: one of
// several modules, several, or none.
//
//   auto blocks = blocks_of<Layer>(*net->layers);
//   blocks.insert(blocks.begin(), {{net->tokens.ptr()}, [net](const auto& x) { … }});
//   blocks.push_back({{net->norm.ptr(), net->head.ptr()}, [net](const auto& x) { … }});
struct ListedModel {
  std::shared_ptr<torch::nn::Module> model;
  std::vector<ModelBlock> blocks;  // in the order of forward
  // What the first block is given of a micro-batch, on the rank that has it.
  std::function<std::vector<at::Tensor>(int micro_batch)> input;
  // One number of what the last one makes, summed over the micro-batch, on the rank that has it.
  std::function<at::Tensor(int micro_batch, const std::vector<at::Tensor>& outputs)> loss;
};

struct ModelStages {
  std::map<int, Stage> mine;        // for a Pipeline, as are
  std::vector<TiedParameter> tied;  // PipelineOptions::tied
  Cuts cuts;                        // of all blocks, the same on every rank
};

// Every rank of the group calls it with the same model; rank_of_stage is the schedule's. The model
// keeps this rank's modules, under their names, and these are moved to `device`; those that only
// other ranks' blocks list are unregistered and left without memory. So a model's
// named_parameters() are this rank's part of the whole, for optimizers, clipping and checkpoints
// (DistributedManager::wrap_model).
//
// A parameter that blocks of several stages list has one value, that of the first of them, and one
// gradient; so has one that no block lists, and that every rank keeps: a table that all blocks look
// at, or a parameter of the model itself.
//
// Balance::time measures micro-batch 0 on the group's first rank, which needs the input for that,
// on the device that the model is on.
//
// UsageError, on all ranks and before anything is freed, for more stages than blocks, cuts that are
// none, modules that are not registered in the model, and what differs between ranks.
ModelStages split_model(const ListedModel& model, const std::vector<int>& rank_of_stage,
                        comm::Communicator& group, const BlockCut& cut = {},
                        c10::Device device = at::kCPU);

}  // namespace lockstep::pipeline
