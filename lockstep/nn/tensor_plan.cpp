#include <lockstep/nn/tensor_plan.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <lockstep/base/error.h>
#include <lockstep/nn/layer_names.h>
#include <lockstep/nn/tensor_moves.h>

namespace lockstep::nn {

namespace {

struct PlannedLayer {
  std::string name;
  CuttableLayer* layer;
  const PlannedCut* planned;
};

std::vector<PlannedLayer> planned_layers(torch::nn::Module& model, const TensorPlan& plan) {
  std::vector<PlannedLayer> layers;
  std::unordered_set<const PlannedCut*> used;
  internal::for_each_module(model, [&](const std::string& name, torch::nn::Module& module) {
    const PlannedCut* found = nullptr;
    for (const PlannedCut& planned : plan) {
      if (!matches_layer(planned.layers, name)) continue;
      if (found != nullptr)
        throw UsageError("'{}' is cut by '{}' and by '{}' of the plan: a layer is cut once", name,
                         found->layers, planned.layers);
      found = &planned;
    }
    if (found == nullptr) return;
    used.insert(found);
    auto* const layer = dynamic_cast<CuttableLayer*>(&module);
    if (layer == nullptr)
      throw UsageError("'{}', which '{}' of the plan cuts, is a '{}': only lockstep::nn's Linear "
                       "and Embedding, and the layers made of them, can be cut",
                       name, found->layers, module.name());
    const auto same = std::ranges::find(layers, layer, &PlannedLayer::layer);
    if (same == layers.end()) {
      layers.push_back({name, layer, found});
    } else if (same->planned->cut != found->cut) {
      throw UsageError("'{}' and '{}' are one layer, and '{}' and '{}' of the plan cut it in "
                       "different ways",
                       same->name, name, same->planned->layers, found->layers);
    }
  });
  for (const PlannedCut& planned : plan)
    if (!used.contains(&planned))
      throw UsageError("no layer of this '{}' is called '{}', which the plan cuts", model.name(),
                       planned.layers);
  return layers;
}

}  // namespace

void apply_plan(torch::nn::Module& model, const TensorPlan& plan,
                const std::shared_ptr<TensorAxis>& axis) {
  const std::vector<PlannedLayer> layers = planned_layers(model, plan);
  std::unordered_map<const c10::TensorImpl*, const PlannedLayer*> in_layers;
  for (const PlannedLayer& one : layers) {
    one.layer->check_cut(one.planned->cut, *axis, one.name);
    for (const at::Tensor& parameter :
         dynamic_cast<const torch::nn::Module&>(*one.layer).parameters(/*recurse=*/false)) {
      const auto [other, added] = in_layers.try_emplace(parameter.unsafeGetTensorImpl(), &one);
      if (!added)
        throw UsageError("'{}' and '{}' share a weight, which can be cut for one of them only: use "
                         "the layer itself twice",
                         other->second->name, one.name);
    }
  }
  // Or the gradients of layers that one plan leaves whole and another cuts would be summed.
  if (axis->by_positions() && !cut_parameters(model).empty())
    throw UsageError("layers of this '{}' are cut already, and with sequence parallelism one plan "
                     "names all of them",
                     model.name());
  for (const PlannedLayer& one : layers) one.layer->cut(one.planned->cut, axis, one.name);
  if (!axis->by_positions()) return;
  for (const at::Tensor& parameter : model.parameters())
    if (!in_layers.contains(parameter.unsafeGetTensorImpl()))
      sum_gradients_over(parameter, axis->group());
}

}  // namespace lockstep::nn
