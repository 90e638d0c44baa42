// Where a model's modules are called from.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

namespace lockstep::activations {

struct BlockPlace {
  std::string name;  // in the model
  std::shared_ptr<torch::nn::Module> module;
  // Has the module recomputed from now on. Empty where the code that calls it is out of reach.
  std::function<void()> set_recomputed;
};

// Every module below the model, each after the one that holds it. Refers to the model.
std::vector<BlockPlace> places_in(torch::nn::Module& model);

// Those that repeat: the elements of lists that are not alone of their type there and have modules
// of their own; not what is inside of one.
std::vector<BlockPlace> repeated_blocks(torch::nn::Module& model);

}  // namespace lockstep::activations
