#include <lockstep/nn/tensor_plan.h>

#include <string_view>
#include <unordered_set>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_moves.h>

namespace lockstep::nn {

namespace {

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() != '*')
    return !name.empty() && pattern.front() == name.front() &&
           matches(pattern.substr(1), name.substr(1));
  if (matches(pattern.substr(1), name)) return true;
  return !name.empty() && name.front() != '.' && matches(pattern, name.substr(1));
}

struct PlannedLayer {
  std::string name;
  CuttableLayer* layer;
  const PlannedCut* planned;
};

std::vector<PlannedLayer> planned_layers(const torch::nn::Module& model, const TensorPlan& plan) {
  std::vector<PlannedLayer> layers;
  std::unordered_set<const PlannedCut*> used;
  for (const auto& item : model.named_modules()) {
    const PlannedCut* found = nullptr;
    for (const PlannedCut& planned : plan) {
      if (!matches(planned.layers, item.key())) continue;
      if (found != nullptr)
        throw UsageError("'{}' is cut by '{}' and by '{}' of the plan: a layer is cut once",
                         item.key(), found->layers, planned.layers);
      found = &planned;
    }
    if (found == nullptr) continue;
    used.insert(found);
    auto* const layer = dynamic_cast<CuttableLayer*>(item.value().get());
    if (layer == nullptr)
      throw UsageError("'{}', which '{}' of the plan cuts, is a '{}': only lockstep::nn's Linear "
                       "and Embedding, and the layers made of them, can be cut",
                       item.key(), found->layers, item.value()->name());
    layers.push_back({item.key(), layer, found});
  }
  for (const PlannedCut& planned : plan)
    if (!used.contains(&planned))
      throw UsageError("no layer of this '{}' is called '{}', which the plan cuts", model.name(),
                       planned.layers);
  return layers;
}

}  // namespace

void apply_plan(torch::nn::Module& model, const TensorPlan& plan,
                const std::shared_ptr<TensorAxis>& axis) {
  std::unordered_set<const c10::TensorImpl*> in_layers;
  for (const PlannedLayer& one : planned_layers(model, plan)) {
    one.layer->cut(one.planned->cut, axis, one.name);
    for (const at::Tensor& parameter :
         dynamic_cast<const torch::nn::Module&>(*one.layer).parameters(/*recurse=*/false))
      in_layers.insert(parameter.unsafeGetTensorImpl());
  }
  if (!axis->by_positions()) return;
  for (const at::Tensor& parameter : model.parameters())
    if (!in_layers.contains(parameter.unsafeGetTensorImpl()))
      sum_gradients_over(parameter, axis->group());
}

}  // namespace lockstep::nn
