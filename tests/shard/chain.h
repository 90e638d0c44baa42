// The models of these tests, and how they are sharded.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/optim/parameters.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>
#include <tests/ranks/cells.h>

namespace lockstep::shard {

// Layers of one size, each a unit by itself.
struct ChainImpl : torch::nn::Module {
  torch::nn::ModuleList layers;
  explicit ChainImpl(int num_layers, std::int64_t width = 5) {
    register_module("layers", layers);
    for (int layer = 0; layer < num_layers; ++layer)
      layers->push_back(torch::nn::Linear(width, width));
  }
  torch::nn::LinearImpl& layer(std::size_t index) {
    return *layers->ptr<torch::nn::LinearImpl>(index);
  }
  at::Tensor forward(at::Tensor hidden) {
    for (std::size_t index = 0; index < layers->size(); ++index)
      hidden = at::tanh(layer(index).forward(hidden));
    return hidden;
  }
};
TORCH_MODULE(Chain);

// Fills freed memory with NaN, so that a read after the release shows.
inline Options scrubbed(Options options = {}) {
  options.scrub_freed_memory = true;
  return options;
}

inline FullyShardedDataParallel sharded(const ranks::Cells& cells, torch::nn::Module& module,
                                        Options options = {}) {
  return FullyShardedDataParallel(module, shard_over(cells.group()), scrubbed(std::move(options)));
}

inline std::unique_ptr<optim::Optimizer> adamw(FullyShardedDataParallel& parallel,
                                               const torch::nn::Module& module) {
  return parallel.make_optimizer(
      optim::AdamWOptions{}, optim::decay_groups(data_parallel::trained_parameters(module), 0.1));
}

}  // namespace lockstep::shard
