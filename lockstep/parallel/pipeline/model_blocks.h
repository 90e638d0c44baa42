// The blocks of a model, and which rank of a pipeline has which of them.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <lockstep/base/error.h>
#include <lockstep/base/held_module.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/schedule/partition.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

struct ModelBlock {
  // The modules that it computes with, any number of them, each registered somewhere in the model.
  // Several blocks may list the same module, and then share it.
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  // Takes the outputs of the block before it, any number of tensors.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)> forward;
};

// The block of a module that makes a tensor of a tensor: a shared_ptr, or a holder (TORCH_MODULE).
template <typename Module>
ModelBlock block_of(const std::shared_ptr<Module>& module) {
  return {{module}, [module](const std::vector<at::Tensor>& inputs) {
            return std::vector<at::Tensor>{module->forward(inputs.at(0))};
          }};
}
template <typename Module>
ModelBlock block_of(const torch::nn::ModuleHolder<Module>& module) {
  return block_of(module.ptr());
}

// The block of a function of one tensor, and the modules that it computes with.
template <typename Function>
requires std::is_invocable_r_v<at::Tensor, Function&, const at::Tensor&> ModelBlock
block_of(std::vector<std::shared_ptr<torch::nn::Module>> modules, Function forward) {
  return {std::move(modules), [forward](const std::vector<at::Tensor>& inputs) mutable {
            return std::vector<at::Tensor>{forward(inputs.at(0))};
          }};
}

// The blocks of many modules: of a std::vector, or of a ModuleList whose elements are all a Block.
// UsageError where one is not.
template <typename Block>
std::vector<ModelBlock> blocks_of(const std::vector<Block>& list) {
  std::vector<ModelBlock> blocks;
  for (const Block& block : list) blocks.push_back(block_of(block));
  return blocks;
}
template <typename Block>
std::vector<ModelBlock> blocks_of(const torch::nn::ModuleListImpl& list) {
  std::vector<ModelBlock> blocks;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto block = std::dynamic_pointer_cast<held_module<Block>>(list.ptr(i));
    if (block == nullptr)
      throw UsageError("block {} of the list is a {}, and is listed as one of another type", i,
                       list.ptr(i)->name());
    blocks.push_back(block_of(block));
  }
  return blocks;
}
std::vector<ModelBlock> blocks_of(const torch::nn::Sequential& model);

// The blocks of a model that says which they are: what its member pipeline_blocks() returns, or a
// Sequential's children. None of any other. Model: a holder or a shared_ptr of `module`.
template <typename Model>
std::vector<ModelBlock> listed_blocks(Model& model,
                                      const std::shared_ptr<torch::nn::Module>& module) {
  if constexpr (requires {
                  { model->pipeline_blocks() } -> std::convertible_to<std::vector<ModelBlock>>;
                }) {
    return model->pipeline_blocks();
  } else {
    const auto children = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(module);
    if (children == nullptr) return {};
    return blocks_of(torch::nn::Sequential(children));
  }
}

// Blocks and lists of blocks, one after the other:
//
//   in_a_row(block_of(…), blocks_of<Layer>(*net->layers), block_of(…))
template <typename... Blocks>
std::vector<ModelBlock> in_a_row(Blocks... blocks) {
  std::vector<ModelBlock> row;
  const auto add = [&row](auto& next) {
    if constexpr (std::is_same_v<std::decay_t<decltype(next)>, ModelBlock>)
      row.push_back(std::move(next));
    else
      row.insert(row.end(), next.begin(), next.end());
  };
  (add(blocks), ...);
  return row;
}

// The module's parameters and buffers.
std::vector<at::Tensor> tensors_of(const torch::nn::Module& module);

// The number of parameters of each block.
std::vector<double> num_parameters_of(const std::vector<ModelBlock>& blocks);

// The time of each block's forward and backward, the least of some runs; `sample` makes the input
// of the first block. Gradients, the model's buffers and random numbers are left as they were.
std::vector<double> seconds_of(const torch::nn::Module& model,
                               const std::vector<ModelBlock>& blocks,
                               const std::function<std::vector<at::Tensor>()>& sample);

enum class Balance : std::uint8_t {
  parameters,  // by the number of parameters
  time,        // by the time of forward and backward of a sample, on the group's first rank
};

struct BlockCut {
  Balance balance = Balance::parameters;
  Cuts cuts = {};  // if they are given, nothing is balanced
};

// The parameters and buffers of each stage.
using StageTensors = std::vector<std::vector<at::Tensor>>;

struct CutBlocks {
  Cuts cuts;                        // the same on every rank
  StageTensors tensors;             // tensors in no block belong to every stage
  std::vector<TiedParameter> tied;  // the parameters that several stages share
};

struct CutRequest {
  const torch::nn::Module& model;
  const std::vector<ModelBlock>& blocks;
  std::function<std::vector<at::Tensor>()> sample;  // for Balance::time
  const std::vector<int>& rank_of_stage;            // the schedule's
  BlockCut cut;
  std::string fault = {};  // a mistake that the caller has found already
};

// Every rank of a group calls it. UsageError, the same on all of them, where any rank was given
// blocks that cannot be cut, or where their blocks, the tensors in these, shared tensors, or cuts
// differ. cut_blocks() asks the ranks of a pipeline; a job of several pipelines asks all of its
// ranks before.
void check_same_blocks(const CutRequest& request, comm::Communicator& group);

// Every rank of the group calls it with the same request. Tensors that stages of several ranks
// share get the values that they have on the first of these ranks; tensors that only other ranks
// need are left without memory.
//
// UsageError, on all ranks and before anything is freed, for more stages than blocks, cuts that do
// not fit, modules that are not in the model, and anything that differs between ranks.
CutBlocks cut_blocks(const CutRequest& request, comm::Communicator& group);

// Every rank calls it. UsageError, the same on all of them, with the first line that differs.
void check_same_lines(const std::vector<std::string>& lines, comm::Communicator& group);

}  // namespace lockstep::pipeline
