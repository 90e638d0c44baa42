// The values of a model's parameters before training.
#pragma once

#include <cstdint>
#include <string_view>

#include <torch/nn/module.h>

#include <lockstep/models/spec/config.h>

namespace lockstep::models {

// How one parameter begins. A part of it can be filled by itself: nn::fill_normal() takes the
// parameter's name and the offset of the part.
struct InitialWeight {
  enum class Kind { zeros, ones, normal };

  Kind kind = Kind::zeros;
  double std = 0.0;  // only for normal
};

// Biases begin with zeros, norms with ones, all others with normal numbers of the deviation in
// their Layer. UsageError for a parameter that belongs to no layer.
InitialWeight initial_weight(const ModelConfig& config, std::string_view parameter);

// Fills every parameter of a model, in place.
void initialise(torch::nn::Module& model, const ModelConfig& config, std::uint64_t seed);

}  // namespace lockstep::models
