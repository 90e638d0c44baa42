#include <lockstep/parallel/tensor/parallelize_module.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/distinct_tensors.h>
#include <lockstep/parallel/tensor/planned_layers.h>
#include <lockstep/parallel/tensor/save_guard.h>
#include <lockstep/parallel/tensor/split_owner.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

namespace {

// Parameters and buffers; those that are cut say so in their names.
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

// Makes a parameter, which stays the same object, one of which this rank has a part.
void cut_parameter(const PlannedParameter& parameter, const std::shared_ptr<SplitOwner>& owner) {
  const c10::NoGradGuard no_grad;
  const auto source = std::make_shared<const std::string>(parameter.name);
  const auto split = [&](const at::Tensor& whole) {
    const nn::TensorAxis& axis = owner->axis();
    const std::int64_t size = whole.size(parameter.dim) / axis.size();
    // A copy, so that the whole goes.
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
