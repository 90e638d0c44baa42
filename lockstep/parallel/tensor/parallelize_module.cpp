#include <lockstep/parallel/tensor/parallelize_module.h>

#include <algorithm>
#include <cstdint>
#include <ostream>
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
#include <lockstep/intercept/owner.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

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

const char* name_of(Cut cut) { return cut == Cut::column ? "columns" : "rows"; }

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
  nn::refuse_wrapped(model, "parallelize_module()");
  std::vector<PlannedLayer> layers = planned_layers(model, plan);
  for (const PlannedLayer& layer : layers)
    for (const PlannedParameter& parameter : layer.parameters)
      check_parameter(parameter, layer, group);
  check_not_shared(model, layers);
  return layers;
}

// A child module that keeps torch::save() and torch::load() from a layer whose weights are parts.
// They ask every child whether it is in the file, and this one throws UsageError, which says what
// to call instead. It has no parameters. When printed, it says how the layer is cut.
class SaveGuard final : public torch::nn::Module {
 public:
  explicit SaveGuard(std::string cut) : cut_(std::move(cut)) {}

  bool is_serializable() const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  std::string cut_;  // "cut by columns over 4 ranks"
};

bool SaveGuard::is_serializable() const {
  throw UsageError("torch::save() and torch::load() find nothing of a layer's weights that is {}: "
                   "write what full_state_dict() returns on the first rank, and load into the "
                   "model before parallelize_module(), or with load_full_state_dict()",
                   cut_);
}

void SaveGuard::pretty_print(std::ostream& stream) const { stream << cut_; }

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
      for (const PlannedParameter& parameter : layer.parameters) cut_parameter(parameter, owner);
      layer.module->register_module(
          "tensor_parallel",
          std::make_shared<SaveGuard>(fmt::format(
              "cut by {} over {} ranks", name_of(layer.planned->cut), owner->axis().size())));
    }
  }
  return ParallelizedModule(owner, std::move(tensors));
}

std::vector<Gathered> ParallelizedModule::gathers() const { return owner_->gathers().all(); }

void ParallelizedModule::forget_gathers() { owner_->gathers().clear(); }

std::vector<nn::CutParameter> ParallelizedModule::cut_parameters() const {
  std::vector<nn::CutParameter> all;
  for (const auto& [name, tensor] : tensors_) {
    const Split* const split = split_of(tensor);
    if (split == nullptr) continue;
    const std::vector<std::int64_t> shape = tensor.sizes().vec();
    const nn::TensorAxis& axis = split->owner->axis();
    all.push_back({name, local_part(tensor), shape,
                   mesh::Placement::full(shape).cut_dim(static_cast<int>(split->dim), axis.rank(),
                                                        axis.size())});
  }
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
