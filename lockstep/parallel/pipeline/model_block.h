// A block of a model, as a pipeline can place it: what it computes with, and how.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <lockstep/base/error.h>
#include <lockstep/base/held_module.h>

namespace lockstep::pipeline {

struct ModelBlock {
  // What it computes with, any number of them, each registered somewhere in the model. One that
  // several blocks list is shared by them.
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  // From what the block before it made, any number of tensors.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)> forward;
};

// A module that makes a tensor of a tensor: a shared_ptr, or a holder (TORCH_MODULE).
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

// Many of them: a std::vector of such, or a ModuleList of which each is a Block; UsageError where
// one is not.
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

// Parameters and buffers.
std::vector<at::Tensor> tensors_of(const torch::nn::Module& module);

// Of each block.
std::vector<double> num_parameters_of(const std::vector<ModelBlock>& blocks);

// Of each block, forward and backward, the least of some runs, with what `sample` gives the first.
// Gradients, the model's buffers and random numbers are as before.
std::vector<double> seconds_of(const torch::nn::Module& model,
                               const std::vector<ModelBlock>& blocks,
                               const std::function<std::vector<at::Tensor>()>& sample);

}  // namespace lockstep::pipeline
