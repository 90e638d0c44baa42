// What a model's parameters are before training.
#pragma once

#include <cstdint>
#include <string_view>

#include <torch/nn/module.h>

#include <lockstep/models/spec/config.h>

namespace lockstep::models {

// How one parameter begins. A part of it can be made alone: nn::fill_normal() with the parameter's
// name and the offset of the part.
struct InitialWeight {
  enum class Kind { zeros, ones, normal };

  Kind kind = Kind::zeros;
  double std = 0.0;  // of normal
};

// Biases begin with zeros, norms with ones, the rest with normal numbers of the deviation that its
// Layer says. UsageError for a parameter of no layer.
InitialWeight initial_weight(const ModelConfig& config, std::string_view parameter);

// Fills every parameter of a model, in place.
void initialise(torch::nn::Module& model, const ModelConfig& config, std::uint64_t seed);

}  // namespace lockstep::models
