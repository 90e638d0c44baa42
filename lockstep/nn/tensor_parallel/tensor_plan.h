// Says, outside of a model, which of its layers are cut over a tensor axis, and how.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>

namespace lockstep::nn {

struct PlannedCut {
  // A pattern for names of layers in the model: "*" stands for any run of characters without a dot.
  std::string layers;
  LayerCut cut;
};

using TensorPlan = std::vector<PlannedCut>;

// Cuts the layers that a plan names, which must be CuttableLayers. If activations are cut by
// positions between layers, the gradients of all other parameters, which each rank has whole, are
// summed over the axis. Every rank of the axis calls it, on the same model with the same weights.
//
// UsageError, before anything is cut, for a pattern that no layer matches, a layer that two match,
// that is cut already or cannot be cut, sizes that do not suit the axis, two layers that share a
// weight, and a model that is wrapped already. A layer that is in the model under several names is
// cut once. With activations cut by positions, one plan names all layers that are cut.
void apply_plan(torch::nn::Module& model, const TensorPlan& plan,
                const std::shared_ptr<TensorAxis>& axis);

// Whether a layer's name matches a pattern, in which "*" stands for any run of characters without a
// dot. The model itself has an empty name, which only the empty pattern matches.
bool matches_layer(std::string_view pattern, std::string_view name);

// Calls visit(name, module, planned) for each module that matches the pattern `layers` of an
// element of `plan`. UsageError if two elements match the same layer, or one matches none.
template <typename Planned, typename Visit>
void for_each_planned_layer(torch::nn::Module& model, const std::vector<Planned>& plan,
                            const Visit& visit) {
  std::vector<bool> used(plan.size());
  internal::for_each_module(model, [&](const std::string& name, torch::nn::Module& module) {
    const Planned* found = nullptr;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      if (!matches_layer(plan[i].layers, name)) continue;
      if (found != nullptr)
        throw UsageError("'{}' is cut by '{}' and by '{}' of the plan: a layer is cut once", name,
                         found->layers, plan[i].layers);
      found = &plan[i];
      used[i] = true;
    }
    if (found != nullptr) visit(name, module, *found);
  });
  for (std::size_t i = 0; i < plan.size(); ++i)
    if (!used[i])
      throw UsageError("no layer of this '{}' is called '{}', which the plan cuts", model.name(),
                       plan[i].layers);
}

}  // namespace lockstep::nn
