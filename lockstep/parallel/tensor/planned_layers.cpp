#include <lockstep/parallel/tensor/planned_layers.h>

#include <algorithm>
#include <unordered_map>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/nn/layer_cut.h>
#include <lockstep/nn/planned_layers.h>

namespace lockstep::tensor {

namespace {

// What is cut of a layer. UsageError where it is none that can be.
std::vector<PlannedParameter> parameters_of(const std::string& name, torch::nn::Module& module,
                                            const PlannedCut& planned) {
  const std::string prefix = name.empty() ? "" : name + ".";
  if (auto* const linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
    if (planned.cut == Cut::row) return {{prefix + "weight", linear->weight, 1}};
    std::vector<PlannedParameter> parameters{{prefix + "weight", linear->weight, 0}};
    if (linear->bias.defined()) parameters.push_back({prefix + "bias", linear->bias, 0});
    return parameters;
  }
  if (auto* const embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module))
    return {{prefix + "weight", embedding->weight, planned.cut == Cut::column ? 1 : 0}};
  throw UsageError("'{}', which '{}' of the plan cuts, is a '{}': only torch::nn::Linear and "
                   "torch::nn::Embedding can be cut; those of lockstep::nn have nn::apply_plan()",
                   name, planned.layers, module.name());
}

std::vector<PlannedLayer> planned_layers(torch::nn::Module& model, const Plan& plan) {
  std::vector<PlannedLayer> layers;
  const auto add = [&](const std::string& name, torch::nn::Module& module,
                       const PlannedCut& planned) {
    const auto same = std::ranges::find(layers, &module, &PlannedLayer::module);
    if (same == layers.end())
      layers.push_back({name, &module, &planned, parameters_of(name, module, planned)});
    else if (same->planned->cut != planned.cut)
      throw UsageError("'{}' and '{}' are one layer, and '{}' and '{}' of the plan cut it in "
                       "different ways",
                       same->name, name, same->planned->layers, planned.layers);
  };
  nn::for_each_planned_layer(model, plan, add);
  return layers;
}

void check_parameter(const PlannedParameter& parameter, const PlannedLayer& layer,
                     const comm::Communicator& group) {
  const at::Tensor& tensor = parameter.tensor;
  if (is_cut(tensor)) throw UsageError("'{}' is cut already", parameter.name);
  if (!intercept::owners_of(tensor).empty())
    throw UsageError("'{}' belongs to another strategy already, as a sharded parameter does: cut "
                     "the layers first",
                     parameter.name);
  if (tensor.layout() != at::kStrided || !at::isFloatingType(tensor.scalar_type()))
    throw UsageError("'{}' is no dense tensor of floating point numbers, and cannot be cut",
                     parameter.name);
  const std::int64_t size = tensor.size(parameter.dim);
  if (size == 0 || size % group.size() != 0)
    throw UsageError("'{}' of shape [{}] cannot be cut by {} over the {} ranks of '{}', as '{}' of "
                     "the plan has it: {} is no multiple of {}",
                     parameter.name, fmt::join(tensor.sizes(), ", "), name_of(layer.planned->cut),
                     group.size(), group.name(), layer.planned->layers, size, group.size());
}

// A parameter is cut for one layer: another module would see all of it, with a part behind it.
void check_not_shared(const torch::nn::Module& model, const std::vector<PlannedLayer>& layers) {
  struct Place {
    const torch::nn::Module* module;
    std::string name;
  };
  std::unordered_multimap<const c10::StorageImpl*, Place> places;
  nn::internal::for_each_module(
      model, [&](const std::string& name, const torch::nn::Module& module) {
        const auto add = [&](const auto& tensors) {
          for (const auto& item : tensors)
            if (item.value().defined() && item.value().has_storage())
              places.emplace(
                  item.value().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(),
                  Place{&module, name.empty() ? item.key() : name + "." + item.key()});
        };
        add(module.named_parameters(/*recurse=*/false));
        add(module.named_buffers(/*recurse=*/false));
      });
  for (const PlannedLayer& layer : layers)
    for (const PlannedParameter& parameter : layer.parameters) {
      const auto [first, last] =
          places.equal_range(parameter.tensor.storage().unsafeGetStorageImpl());
      for (auto place = first; place != last; ++place)
        if (place->second.module != layer.module)
          throw UsageError("'{}' and '{}' share their memory, which can be cut for one of them "
                           "only: leave '{}' out of the plan, or give each weights of its own",
                           parameter.name, place->second.name, layer.name);
    }
}

}  // namespace

const char* name_of(Cut cut) { return cut == Cut::column ? "columns" : "rows"; }

std::vector<PlannedLayer> checked_layers(torch::nn::Module& model, const Plan& plan,
                                         const comm::Communicator& group) {
  if (plan.empty()) throw UsageError("the plan names no layer to cut");
  nn::refuse_wrapped(model, "parallelize_module()");
  std::vector<PlannedLayer> layers = planned_layers(model, plan);
  for (const PlannedLayer& layer : layers)
    for (const PlannedParameter& parameter : layer.parameters)
      check_parameter(parameter, layer, group);
  check_not_shared(model, layers);
  return layers;
}

}  // namespace lockstep::tensor
