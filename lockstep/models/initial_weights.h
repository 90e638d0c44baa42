// What a model's parameters are before training.
#pragma once

#include <cstdint>
#include <string_view>

#include <torch/nn/module.h>

#include <lockstep/models/config.h>

namespace lockstep::models {

// How one parameter begins. A part of it can be made alone: nn::fill_normal() with the parameter's
// name and the offset of the part.
struct InitialWeight {
  enum class Kind { zeros, ones, normal };

  Kind kind = Kind::zeros;
  double std = 0.0;  // of normal
};

// Biases are zeros, norms ones, the rest normal numbers of standard deviation 0.02; GPT-2's layers
// that add to the residual stream have that over sqrt(2·layers), which keeps the stream's size from
// growing with depth.
InitialWeight initial_weight(const ModelConfig& config, std::string_view parameter);

// Fills every parameter of a model, in place.
void initialise(torch::nn::Module& model, const ModelConfig& config, std::uint64_t seed);

}  // namespace lockstep::models
