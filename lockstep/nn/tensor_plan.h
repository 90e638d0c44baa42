// Which layers of a model are cut over a tensor axis, and how: outside of the model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/nn/layer_cut.h>

namespace lockstep::nn {

struct PlannedCut {
  // The names of layers in the model: "*" stands for any run of characters without a dot.
  std::string layers;
  LayerCut cut;
};

using TensorPlan = std::vector<PlannedCut>;

// Cuts the layers that a plan names, which are CuttableLayers. With activations cut by positions
// between layers, the gradients of all other parameters, which each rank has whole, are summed over
// the axis. Every rank of the axis calls it, on the same model with the same weights.
//
// UsageError, before anything is cut, for a pattern that no layer matches, a layer that two match,
// that is cut already or cannot be cut, sizes that do not suit the axis, two layers that share a
// weight, and a model that is wrapped already. A layer that is in the model under several names is
// cut once. With activations cut by positions, one plan names all layers that are cut.
void apply_plan(torch::nn::Module& model, const TensorPlan& plan,
                const std::shared_ptr<TensorAxis>& axis);

}  // namespace lockstep::nn
