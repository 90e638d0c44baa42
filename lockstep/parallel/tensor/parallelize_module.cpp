#include <lockstep/parallel/tensor/parallelize_module.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/data_parallel/save_guard.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

const char* name_of(Cut cut) { return cut == Cut::column ? "columns" : "rows"; }

namespace {

// A parameter of a layer that is cut.
struct PlannedParameter {
  std::string name;
  at::Tensor tensor;
  std::int64_t dim;
};

struct PlannedLayer {
  std::string name;
  torch::nn::Module* module;
  const PlannedCut* planned;
  std::vector<PlannedParameter> parameters;
};

// The parameters of a layer that are cut. UsageError where the layer cannot be cut.
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

// A parameter is cut for one layer. Another module that shares it would see a whole with the memory
// of a part.
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

// UsageError, with the numbers, for any part of the plan that does not suit the model or the group.
std::vector<PlannedLayer> checked_layers(torch::nn::Module& model, const Plan& plan,
                                         const comm::Communicator& group) {
  if (plan.empty()) throw UsageError("the plan names no layer to cut");
  intercept::refuse_wrapped(model, "parallelize_module()");
  std::vector<PlannedLayer> layers = planned_layers(model, plan);
  for (const PlannedLayer& layer : layers)
    for (const PlannedParameter& parameter : layer.parameters)
      check_parameter(parameter, layer, group);
  check_not_shared(model, layers);
  return layers;
}

nn::CutParameter description_of(std::string name, const at::Tensor& parameter,
                                const at::Tensor& part) {
  const Split& split = *split_of(parameter);
  const std::vector<std::int64_t> shape = parameter.sizes().vec();
  const nn::TensorAxis& axis = split.owner->axis();
  return {
      std::move(name), part, shape,
      mesh::Placement::full(shape).cut_dim(static_cast<int>(split.dim), axis.rank(), axis.size())};
}

// Says how a layer is cut, and keeps torch::save() and torch::load() from it.
class SplitRecord final : public data_parallel::SaveGuard, public nn::CutRecord {
 public:
  // `how`: "cut by columns over 4 ranks". `parameters`: those of the layer, by their names in it.
  SplitRecord(const std::string& how, std::vector<NamedTensor> parameters)
      : SaveGuard(
            "tensor_parallel",
            fmt::format("torch::save() and torch::load() find nothing of a layer's weights that is "
                        "{}: write what full_state_dict() returns on the first rank, and load into "
                        "the model before parallelize_module(), or with load_full_state_dict()",
                        how),
            how),
        parameters_(std::move(parameters)) {}

  std::vector<nn::CutParameter> cut_parameters() const override;

 private:
  std::vector<NamedTensor> parameters_;
};

std::vector<nn::CutParameter> SplitRecord::cut_parameters() const {
  std::vector<nn::CutParameter> all;
  for (const auto& [name, tensor] : parameters_)
    all.push_back(description_of(name, tensor, split_of(tensor)->part));
  return all;
}

// Parameters and buffers; the names of those that are cut say so.
std::vector<NamedTensor> described(const std::vector<NamedTensor>& tensors,
                                   const std::vector<PlannedLayer>& layers) {
  std::vector<NamedTensor> all = tensors;
  for (const PlannedLayer& layer : layers)
    for (const PlannedParameter& parameter : layer.parameters) {
      const auto one = std::ranges::find_if(
          all, [&](const NamedTensor& named) { return named.tensor.is_same(parameter.tensor); });
      LOCKSTEP_CHECK(one != all.end());
      one->name += fmt::format(", cut by {}", name_of(layer.planned->cut));
    }
  return all;
}

std::vector<NamedTensor> tensors_of(const torch::nn::Module& model) {
  std::vector<NamedTensor> all = data_parallel::distinct_tensors(model.named_parameters());
  for (NamedTensor& buffer : data_parallel::distinct_tensors(model.named_buffers()))
    all.push_back(std::move(buffer));
  return all;
}

// Replaces a parameter's memory by this rank's part. It stays the same object.
void cut_parameter(const PlannedParameter& parameter, const std::shared_ptr<SplitOwner>& owner) {
  const c10::NoGradGuard no_grad;
  const auto source = std::make_shared<const std::string>(parameter.name);
  const auto split = [&](const at::Tensor& whole) {
    const nn::TensorAxis& axis = owner->axis();
    const std::int64_t size = whole.size(parameter.dim) / axis.size();
    // The part is a copy, so that the whole is freed.
    const at::Tensor part = whole.detach()
                                .narrow(parameter.dim, axis.rank() * size, size)
                                .clone(at::MemoryFormat::Contiguous);
    return make_split({owner, part, parameter.dim, source});
  };
  const at::Tensor& tensor = parameter.tensor;
  const at::Tensor gradient = std::exchange(tensor.mutable_grad(), at::Tensor());
  const at::Tensor cut = split(tensor);
  {
    const c10::impl::ExcludeDispatchKeyGuard unheard(intercept::kKey);
    tensor.set_data(cut);
  }
  torch::autograd::impl::set_version_counter(tensor, torch::autograd::impl::version_counter(cut));
  if (gradient.defined()) tensor.mutable_grad() = split(gradient);
}

}  // namespace

ParallelizedModule parallelize_module(torch::nn::Module& module,
                                      std::shared_ptr<comm::Communicator> group, const Plan& plan) {
  intercept::claim_key();
  std::vector<NamedTensor> tensors = tensors_of(module);
  std::vector<PlannedLayer> layers;
  std::string fault;
  try {
    layers = checked_layers(module, plan, *group);
  } catch (const UsageError& error) {
    fault = error.what();
  }
  data_parallel::refuse_together(fault, *group);
  data_parallel::check_same_tensors(described(tensors, layers), *group);
  const auto owner = std::make_shared<SplitOwner>(std::move(group));
  if (owner->axis().size() > 1) {
    std::vector<NamedTensor> whole;
    for (const NamedTensor& one : tensors)
      if (!is_cut(one.tensor)) whole.push_back(one);
    data_parallel::broadcast_from_first(whole, *owner->axis().group());
    for (const PlannedLayer& layer : layers) {
      std::vector<NamedTensor> cut;
      for (const PlannedParameter& parameter : layer.parameters) {
        cut_parameter(parameter, owner);
        cut.push_back({parameter.name.substr(parameter.name.rfind('.') + 1), parameter.tensor});
      }
      data_parallel::guard_saving(
          *layer.module, std::make_shared<SplitRecord>(
                             fmt::format("cut by {} over {} ranks", name_of(layer.planned->cut),
                                         owner->axis().size()),
                             std::move(cut)));
    }
  }
  return ParallelizedModule(owner, std::move(tensors));
}

std::vector<Gathered> ParallelizedModule::gathers() const { return owner_->gathers().all(); }

void ParallelizedModule::forget_gathers() { owner_->gathers().clear(); }

std::vector<nn::CutParameter> ParallelizedModule::cut_parameters() const {
  std::vector<nn::CutParameter> all;
  for (const auto& [name, tensor] : tensors_)
    if (is_cut(tensor)) all.push_back(description_of(name, tensor, local_part(tensor)));
  return all;
}

std::vector<NamedTensor> ParallelizedModule::full_state_dict() const {
  const c10::NoGradGuard no_grad;
  std::vector<NamedTensor> state;
  for (const auto& [name, tensor] : tensors_) {
    const at::Tensor whole = full_tensor(tensor.detach());
    if (owner_->axis().rank() == 0) state.push_back({name, whole.clone()});
  }
  return state;
}

void ParallelizedModule::load_full_state_dict(const std::vector<NamedTensor>& state) {
  const c10::NoGradGuard no_grad;
  comm::Communicator& group = *owner_->axis().group();
  const bool first = group.rank() == 0;
  const auto find = [&](const std::string& name) {
    return std::ranges::find(state, name, &NamedTensor::name);
  };
  std::string fault;
  if (first) {
    for (const auto& [name, tensor] : tensors_) {
      const auto given = find(name);
      if (given == state.end())
        fault = fmt::format("the state has no '{}', which the model has", name);
      else if (given->tensor.sizes() != tensor.sizes())
        fault =
            fmt::format("'{}' is of shape [{}] in the state and [{}] in the model", name,
                        fmt::join(given->tensor.sizes(), ", "), fmt::join(tensor.sizes(), ", "));
    }
    for (const NamedTensor& given : state)
      if (std::ranges::find(tensors_, given.name, &NamedTensor::name) == tensors_.end())
        fault = fmt::format("the state has '{}', which the model has not", given.name);
  }
  if (tensors_.empty()) return;
  data_parallel::refuse_together(fault, group);
  for (const auto& [name, tensor] : tensors_) {
    const at::Tensor whole = at::empty(
        tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device()));
    if (first) whole.copy_(find(name)->tensor);
    if (whole.numel() > 0) group.broadcast(whole, 0).wait();
    tensor.detach().copy_(whole);
  }
}

bool is_cut(const at::Tensor& tensor) { return split_of(tensor) != nullptr; }

at::Tensor full_tensor(const at::Tensor& tensor) {
  return is_cut(tensor) ? whole_of(tensor) : tensor;
}

at::Tensor local_part(const at::Tensor& tensor) {
  const Split* const split = split_of(tensor);
  return split != nullptr ? split->part.detach() : tensor;
}

}  // namespace lockstep::tensor
