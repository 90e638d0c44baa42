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
#include <torch/nn/modules/activation.h>
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

const char* name_of(Cut cut) {
  switch (cut) {
    case Cut::column: return "columns";
    case Cut::row: return "rows";
    case Cut::heads: return "heads";
    case Cut::qkv: return "columns of queries, keys and values";
  }
  LOCKSTEP_CHECK(false, "a cut without a name");
}

namespace {

// A parameter of a layer that is cut.
struct PlannedParameter {
  std::string name;
  at::Tensor tensor;
  CutDim cut;
};

struct PlannedLayer {
  std::string name;
  torch::nn::Module* module;
  const PlannedCut* planned;
  std::vector<PlannedParameter> parameters;
};

std::vector<PlannedParameter> parameters_of(const std::string& prefix,
                                            const torch::nn::MultiheadAttentionImpl& attention) {
  std::vector<PlannedParameter> parameters;
  const auto add = [&](const char* name, const at::Tensor& tensor, CutDim cut) {
    if (tensor.defined()) parameters.push_back({prefix + name, tensor, cut});
  };
  add("in_proj_weight", attention.in_proj_weight, {.dim = 0, .blocks = 3});
  add("in_proj_bias", attention.in_proj_bias, {.dim = 0, .blocks = 3});
  add("q_proj_weight", attention.q_proj_weight, {.dim = 0});
  add("k_proj_weight", attention.k_proj_weight, {.dim = 0});
  add("v_proj_weight", attention.v_proj_weight, {.dim = 0});
  add("bias_k", attention.bias_k, {.dim = 2});
  add("bias_v", attention.bias_v, {.dim = 2});
  return parameters;
}

// The parameters of a layer that are cut, without those of its children. UsageError where the layer
// cannot be cut.
std::vector<PlannedParameter> parameters_of(const std::string& name, torch::nn::Module& module,
                                            const PlannedCut& planned) {
  const std::string prefix = name.empty() ? "" : name + ".";
  const bool by_heads = planned.cut == Cut::heads, of_qkv = planned.cut == Cut::qkv;
  const auto* const linear = dynamic_cast<const torch::nn::LinearImpl*>(&module);
  if (linear != nullptr && !by_heads) {
    if (planned.cut == Cut::row) return {{prefix + "weight", linear->weight, {.dim = 1}}};
    const CutDim cut{.dim = 0, .blocks = of_qkv ? 3 : 1};
    std::vector<PlannedParameter> parameters{{prefix + "weight", linear->weight, cut}};
    if (linear->bias.defined()) parameters.push_back({prefix + "bias", linear->bias, cut});
    return parameters;
  }
  const auto* const embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module);
  if (embedding != nullptr && !by_heads && !of_qkv)
    return {{prefix + "weight", embedding->weight, {.dim = planned.cut == Cut::column ? 1 : 0}}};
  const auto* const attention = dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module);
  if (attention != nullptr && by_heads) return parameters_of(prefix, *attention);
  throw UsageError("'{}', which '{}' of the plan cuts by {}, is a '{}': only torch::nn::Linear and "
                   "torch::nn::Embedding can be cut by columns and rows, a Linear by columns of "
                   "queries, keys and values, and torch::nn::MultiheadAttention by heads; layers "
                   "of lockstep::nn have nn::apply_plan()",
                   name, planned.layers, name_of(planned.cut), module.name());
}

void check_heads(const std::string& name, const torch::nn::MultiheadAttentionImpl& attention,
                 const PlannedCut& planned, const comm::Communicator& group) {
  const std::int64_t heads = attention.options.num_heads();
  if (heads % group.size() != 0)
    throw UsageError("'{}' has {} heads, which '{}' of the plan cuts over the {} ranks of '{}': {} "
                     "is no multiple of {}",
                     name, heads, planned.layers, group.size(), group.name(), heads, group.size());
}

// The output of an attention in heads has each rank's heads as inputs.
void add_output(const std::string& name, torch::nn::MultiheadAttentionImpl& attention,
                const PlannedCut& planned, std::vector<PlannedLayer>& layers) {
  if (std::ranges::count(layers, attention.out_proj.get(), &PlannedLayer::module) > 0) return;
  const std::string output = name.empty() ? "out_proj" : name + ".out_proj";
  layers.push_back({output,
                    attention.out_proj.get(),
                    &planned,
                    {{output + ".weight", attention.out_proj->weight, {.dim = 1}}}});
}

std::vector<PlannedLayer> planned_layers(torch::nn::Module& model, const Plan& plan,
                                         const comm::Communicator& group) {
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
  const auto add_all = [&](const std::string& name, torch::nn::Module& module,
                           const PlannedCut& planned) {
    add(name, module, planned);
    if (planned.cut == Cut::heads) {
      auto& attention = dynamic_cast<torch::nn::MultiheadAttentionImpl&>(module);
      check_heads(name, attention, planned, group);
      add_output(name, attention, planned, layers);
    }
  };
  nn::for_each_planned_layer(model, plan, add_all);
  return layers;
}

// `is_deferred`: the parameter belongs to the construction that will make its values.
void check_parameter(const PlannedParameter& parameter, const PlannedLayer& layer,
                     const comm::Communicator& group, bool is_deferred) {
  const at::Tensor& tensor = parameter.tensor;
  if (is_cut(tensor)) throw UsageError("'{}' is cut already", parameter.name);
  if (!is_deferred && !intercept::owners_of(tensor).empty())
    throw UsageError("'{}' belongs to another strategy already, as a sharded parameter does: cut "
                     "the layers first",
                     parameter.name);
  if (tensor.layout() != at::kStrided || !at::isFloatingType(tensor.scalar_type()))
    throw UsageError("'{}' is no dense tensor of floating point numbers, and cannot be cut",
                     parameter.name);
  const std::int64_t size = tensor.size(parameter.cut.dim);
  const std::int64_t least = parameter.cut.blocks * group.size();
  if (size == 0 || size % least != 0)
    throw UsageError("'{}' of shape [{}] cannot be cut by {} over the {} ranks of '{}', as '{}' of "
                     "the plan has it: {} is no multiple of {}",
                     parameter.name, fmt::join(tensor.sizes(), ", "), name_of(layer.planned->cut),
                     group.size(), group.name(), layer.planned->layers, size, least);
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
                                         const comm::Communicator& group, bool is_deferred) {
  if (plan.empty()) throw UsageError("the plan names no layer to cut");
  intercept::refuse_wrapped(model, "parallelize_module()");
  std::vector<PlannedLayer> layers = planned_layers(model, plan, group);
  for (const PlannedLayer& layer : layers)
    for (const PlannedParameter& parameter : layer.parameters)
      check_parameter(parameter, layer, group, is_deferred);
  check_not_shared(model, layers);
  return layers;
}

nn::CutParameter description_of(std::string name, const at::Tensor& parameter,
                                const at::Tensor& part) {
  const Split& split = *split_of(parameter);
  const std::vector<std::int64_t> shape = parameter.sizes().vec();
  const nn::TensorAxis& axis = split.owner->axis();
  std::vector<std::int64_t> in_blocks = shape;
  auto dim = static_cast<int>(split.cut.dim);
  if (split.cut.blocks > 1) {
    in_blocks[static_cast<std::size_t>(dim)] /= split.cut.blocks;
    in_blocks.insert(in_blocks.begin() + dim, split.cut.blocks);
    ++dim;
  }
  return {std::move(name), part, shape,
          mesh::Placement::full(in_blocks).cut_dim(dim, axis.rank(), axis.size())};
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

}  // namespace

// Cuts a model over a group.
class ModuleCutter {
 public:
  // Without `defer` the model's values are in memory, and become those of the first rank.
  ModuleCutter(torch::nn::Module& module, std::shared_ptr<comm::Communicator> group,
               const internal::Defer* defer)
      : module_(module), owner_(std::make_shared<SplitOwner>(std::move(group))), defer_(defer) {}

  ParallelizedModule cut(const Plan& plan) {
    intercept::claim_key();
    comm::Communicator& group = *owner_->axis().group();
    std::vector<NamedTensor> tensors = tensors_of(module_);
    std::vector<PlannedLayer> layers;
    std::string fault;
    try {
      layers = checked_layers(module_, plan, group, defer_ != nullptr);
    } catch (const UsageError& error) {
      fault = error.what();
    }
    data_parallel::refuse_together(fault, group);
    data_parallel::check_same_tensors(described(tensors, layers), group);
    if (group.size() > 1) {
      if (defer_ == nullptr) broadcast_whole(tensors);
      for (const PlannedLayer& layer : layers) cut_layer(layer);
    }
    return ParallelizedModule(owner_, std::move(tensors));
  }

 private:
  void broadcast_whole(const std::vector<NamedTensor>& tensors) {
    std::vector<NamedTensor> whole;
    for (const NamedTensor& one : tensors)
      if (!is_cut(one.tensor)) whole.push_back(one);
    data_parallel::broadcast_from_first(whole, *owner_->axis().group());
  }

  void cut_layer(const PlannedLayer& layer) {
    std::vector<NamedTensor> cut;
    for (const PlannedParameter& parameter : layer.parameters) {
      cut_parameter(parameter);
      cut.push_back({parameter.name.substr(parameter.name.rfind('.') + 1), parameter.tensor});
    }
    const auto record = std::make_shared<SplitRecord>(
        fmt::format("cut by {} over {} ranks", name_of(layer.planned->cut), owner_->axis().size()),
        std::move(cut));
    // The record of each layer is its own child: guard_saving() would look for one below it.
    layer.module->register_module(record->kind(), record);
  }

  // Replaces a parameter's memory by this rank's part. It stays the same object.
  void cut_parameter(const PlannedParameter& parameter) {
    const c10::NoGradGuard no_grad;
    const auto source = std::make_shared<const std::string>(parameter.name);
    const auto split = [&](const at::Tensor& whole) {
      // The part is a copy, so that the whole is freed.
      at::Tensor part;
      const auto make = [&] {
        part = own_part(whole.detach(), parameter.cut, owner_->axis())
                   .clone(at::MemoryFormat::Contiguous);
      };
      if (defer_ == nullptr)
        make();
      else
        (*defer_)(make);
      return make_split({owner_, part, parameter.cut, source});
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

  torch::nn::Module& module_;
  std::shared_ptr<SplitOwner> owner_;
  const internal::Defer* defer_;
};

void check_plan(torch::nn::Module& model, const Plan& plan, const comm::Communicator& group) {
  checked_layers(model, plan, group, /*is_deferred=*/false);
}

ParallelizedModule parallelize_module(torch::nn::Module& module,
                                      std::shared_ptr<comm::Communicator> group, const Plan& plan) {
  return ModuleCutter(module, std::move(group), nullptr).cut(plan);
}

ParallelizedModule internal::parallelize_deferred(torch::nn::Module& module,
                                                  std::shared_ptr<comm::Communicator> group,
                                                  const Plan& plan, const Defer& defer) {
  return ModuleCutter(module, std::move(group), &defer).cut(plan);
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

bool is_cut(const at::Tensor& tensor) {
  const Split* const split = split_of(tensor);
  return split != nullptr && !split->is_sum;
}

at::Tensor full_tensor(const at::Tensor& tensor) {
  return split_of(tensor) != nullptr ? whole_of(tensor) : tensor;
}

at::Tensor local_part(const at::Tensor& tensor) {
  return is_cut(tensor) ? split_of(tensor)->part.detach() : tensor;
}

}  // namespace lockstep::tensor
