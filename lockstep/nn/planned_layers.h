// The layers of a model that a plan's patterns stand for.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/layer_cut.h>
#include <lockstep/nn/layer_names.h>

namespace lockstep::nn {

// Calls visit(name, module, planned) for each module that one of `plan` has the pattern of, in its
// `layers`. UsageError where two of them mean the same layer, or one means none.
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
