#include <lockstep/parallel/data_parallel/model_parameters.h>

#include <algorithm>
#include <unordered_set>

#include <lockstep/base/error.h>

namespace lockstep::data_parallel {

std::vector<NamedTensor> distinct_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::vector<NamedTensor> result;
  std::unordered_set<const void*> seen;
  for (const auto& item : tensors)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.push_back({item.key(), item.value()});
  return result;
}

std::vector<NamedTensor> trained_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> parameters = distinct_tensors(module.named_parameters());
  std::erase_if(parameters,
                [](const NamedTensor& parameter) { return !parameter.tensor.requires_grad(); });
  return parameters;
}

TensorNames::TensorNames(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) all_.push_back({item.key(), item.value()});
  num_parameters_ = all_.size();
  for (const auto& item : module.named_buffers()) all_.push_back({item.key(), item.value()});
  for (std::size_t i = 0; i < all_.size(); ++i) {
    by_name_[all_[i].name] = i;
    firsts_.push_back(
        by_tensor_.try_emplace(all_[i].tensor.unsafeGetTensorImpl(), i).first->second);
  }
}

std::vector<NamedTensor> TensorNames::distinct() const {
  std::vector<NamedTensor> result = distinct_parameters();
  for (NamedTensor& buffer : distinct_buffers()) result.push_back(std::move(buffer));
  return result;
}

std::vector<NamedTensor> TensorNames::distinct_parameters() const {
  std::vector<NamedTensor> result;
  for (std::size_t i = 0; i < num_parameters_; ++i)
    if (is_first(i)) result.push_back(all_[i]);
  return result;
}

std::vector<NamedTensor> TensorNames::distinct_buffers() const {
  std::vector<NamedTensor> result;
  for (std::size_t i = num_parameters_; i < all_.size(); ++i)
    if (is_first(i)) result.push_back(all_[i]);
  return result;
}

std::vector<NamedTensor> TensorNames::trained() const {
  std::vector<NamedTensor> result = distinct_parameters();
  std::erase_if(result, [](const NamedTensor& one) { return !one.tensor.requires_grad(); });
  return result;
}

std::vector<NamedTensor> TensorNames::with_every_name(
    const std::vector<NamedTensor>& distinct) const {
  std::unordered_map<std::string, at::Tensor> given;
  for (const auto& [name, tensor] : distinct) given[name] = tensor;
  std::vector<NamedTensor> result;
  for (std::size_t i = 0; i < all_.size(); ++i)
    if (const auto found = given.find(all_[firsts_[i]].name); found != given.end())
      result.push_back({all_[i].name, found->second});
  return result;
}

std::vector<NamedTensor> TensorNames::with_first_names(const std::vector<NamedTensor>& all) const {
  std::vector<NamedTensor> result;
  for (const NamedTensor& given : all) {
    const auto found = by_name_.find(given.name);
    if (found == by_name_.end() || is_first(found->second)) result.push_back(given);
  }
  return result;
}

const at::Tensor& TensorNames::parameter(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end() || found->second >= num_parameters_)
    throw UsageError("the model has no parameter '{}'; named_parameters() lists them", name);
  return all_[found->second].tensor;
}

const std::string& TensorNames::first_name(const std::string& name) const {
  return all_[by_tensor_.at(parameter(name).unsafeGetTensorImpl())].name;
}

std::vector<optim::ParameterGroup> TensorNames::renamed(
    std::vector<optim::ParameterGroup> groups) const {
  for (optim::ParameterGroup& group : groups)
    for (optim::NamedParameter& parameter : group.parameters)
      if (const auto found = by_tensor_.find(parameter.tensor.unsafeGetTensorImpl());
          found != by_tensor_.end())
        parameter.name = all_[found->second].name;
  return groups;
}

namespace {

// named_parameters() copies names and makes a table, which for 2,000 parameters takes a tenth of
// their backward pass; a subclass may look at what is registered.
struct Registry : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& parameters_of(
      const torch::nn::Module& module) {
    return module.*(&Registry::parameters_);
  }
};

// Calls `visit` with every parameter, in one order. Returns false once `visit` has.
template <typename Visit>
bool visit_parameters(const torch::nn::Module& module, const Visit& visit) {
  for (const auto& item : Registry::parameters_of(module))
    if (!visit(item.value())) return false;
  for (const auto& child : module.children())
    if (!visit_parameters(*child, visit)) return false;
  return true;
}

}  // namespace

RegisteredParameters::RegisteredParameters(torch::nn::Module& module)
    : module_(module.weak_from_this()),
      is_shared_(!module_.expired()),
      module_name_(module.name()) {
  visit_parameters(module, [&](const at::Tensor& parameter) {
    in_order_.push_back(parameter);
    return true;
  });
}

void RegisteredParameters::check_unchanged() const {
  const auto module = module_.lock();
  if (module == nullptr) return;
  std::size_t place = 0;
  const bool same = visit_parameters(*module, [&](const at::Tensor& parameter) {
    return place < in_order_.size() && in_order_[place++].is_same(parameter);
  });
  if (same && place == in_order_.size()) return;
  const torch::OrderedDict<std::string, at::Tensor> now = module->named_parameters();
  for (const auto& item : now)
    if (std::ranges::none_of(in_order_,
                             [&](const at::Tensor& known) { return known.is_same(item.value()); }))
      throw UsageError(
          "'{}' was registered after wrap_model(), or replaced what was there, so that "
          "it would be trained on each rank by itself: make the model whole before",
          item.key());
  throw UsageError("the model '{}' has {} parameters, and others when wrap_model() got it: make "
                   "the model whole before",
                   module_name_, now.size());
}

std::vector<at::Tensor> RegisteredParameters::all() const {
  std::vector<at::Tensor> result = in_order_;
  if (const auto module = module_.lock())
    visit_parameters(*module, [&](const at::Tensor& parameter) {
      result.push_back(parameter);
      return true;
    });
  return result;
}

}  // namespace lockstep::data_parallel
