#include <lockstep/nn/tensor_parallel/tensor_plan.h>

#include <algorithm>
#include <unordered_map>

#include <lockstep/base/error.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>

namespace lockstep::nn {

namespace {

bool matches_rest(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() != '*')
    return !name.empty() && pattern.front() == name.front() &&
           matches_rest(pattern.substr(1), name.substr(1));
  if (matches_rest(pattern.substr(1), name)) return true;
  return !name.empty() && name.front() != '.' && matches_rest(pattern, name.substr(1));
}

}  // namespace

bool matches_layer(std::string_view pattern, std::string_view name) {
  return name.empty() ? pattern.empty() : matches_rest(pattern, name);
}

namespace {

struct PlannedLayer {
  std::string name;
  CuttableLayer* layer;
  const PlannedCut* planned;
};

std::vector<PlannedLayer> planned_layers(torch::nn::Module& model, const TensorPlan& plan) {
  std::vector<PlannedLayer> layers;
  const auto add = [&](const std::string& name, torch::nn::Module& module,
                       const PlannedCut& planned) {
    auto* const layer = dynamic_cast<CuttableLayer*>(&module);
    if (layer == nullptr)
      throw UsageError("'{}', which '{}' of the plan cuts, is a '{}': only lockstep::nn's Linear "
                       "and Embedding, and the layers made of them, can be cut",
                       name, planned.layers, module.name());
    const auto same = std::ranges::find(layers, layer, &PlannedLayer::layer);
    if (same == layers.end()) {
      layers.push_back({name, layer, &planned});
    } else if (same->planned->cut != planned.cut) {
      throw UsageError("'{}' and '{}' are one layer, and '{}' and '{}' of the plan cut it in "
                       "different ways",
                       same->name, name, same->planned->layers, planned.layers);
    }
  };
  for_each_planned_layer(model, plan, add);
  return layers;
}

}  // namespace

void apply_plan(torch::nn::Module& model, const TensorPlan& plan,
                const std::shared_ptr<TensorAxis>& axis) {
  intercept::refuse_wrapped(model, "apply_plan() or cut_parallel_layers()");
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
  // Otherwise the gradients of layers that one plan leaves whole and another cuts would be summed.
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
