#include <lockstep/parallel/data_parallel/model_parameters.h>

#include <algorithm>
#include <unordered_set>

#include <spdlog/fmt/fmt.h>

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

at::Tensor held(const at::Tensor& parameter) {
  const auto owner = intercept::part_owner_of(parameter);
  return owner == nullptr ? parameter : owner->train_part(parameter);
}

torch::OrderedDict<std::string, at::Tensor> held_parameters(const torch::nn::Module& module,
                                                            bool recurse) {
  auto parameters = module.named_parameters(recurse);
  for (auto& item : parameters) item.value() = held(item.value());
  return parameters;
}

std::vector<NamedTensor> trained_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> parameters = distinct_tensors(held_parameters(module));
  std::erase_if(parameters,
                [](const NamedTensor& parameter) { return !parameter.tensor.requires_grad(); });
  return parameters;
}

TensorNames::TensorNames(const torch::nn::Module& module) {
  const auto parameters = module.named_parameters();
  for (const auto& item : parameters) all_.push_back({item.key(), held(item.value())});
  num_parameters_ = all_.size();
  for (const auto& item : module.named_buffers()) all_.push_back({item.key(), item.value()});
  for (std::size_t i = 0; i < all_.size(); ++i) {
    by_name_[all_[i].name] = i;
    firsts_.push_back(
        by_tensor_.try_emplace(all_[i].tensor.unsafeGetTensorImpl(), i).first->second);
  }
  for (std::size_t i = 0; i < num_parameters_; ++i)
    by_tensor_.try_emplace(parameters[i].value().unsafeGetTensorImpl(), firsts_[i]);
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
          found != by_tensor_.end()) {
        parameter.name = all_[found->second].name;
        parameter.tensor = all_[found->second].tensor;
      }
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

bool is_known(const at::Tensor& parameter, const std::vector<at::Tensor>& known) {
  return std::ranges::any_of(known, [&](const at::Tensor& one) { return one.is_same(parameter); });
}

[[noreturn]] void refuse_later(const std::string& parameter) {
  throw UsageError("'{}' was registered after wrap_model(), or replaced what was there, so that it "
                   "would be trained on each rank by itself: make the model whole before",
                   parameter);
}

[[noreturn]] void refuse_other_number(const std::string& module, std::size_t num_parameters) {
  throw UsageError("the model '{}' has {} parameters, and others when wrap_model() got it: make "
                   "the model whole before",
                   module, num_parameters);
}

}  // namespace

RegisteredParameters::RegisteredParameters(torch::nn::Module& module)
    : module_(module.weak_from_this()),
      is_shared_(!module_.expired()),
      module_name_(module.name()) {
  visit_parameters(module, [&](const at::Tensor& parameter) {
    in_order_.push_back(parameter);
    if (const auto owner = intercept::part_owner_of(parameter))
      shown_.push_back({parameter, owner->train_part(parameter), owner});
    return true;
  });
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    if (!part_at_.try_emplace(item.value().get(), parts_.size()).second) continue;
    Part part{.name = item.key(), .module = item.value(), .own = {}};
    for (const auto& parameter : Registry::parameters_of(*item.value()))
      part.own.push_back(parameter.value());
    parts_.push_back(std::move(part));
  }
}

void RegisteredParameters::check_unchanged() const {
  const auto module = module_.lock();
  if (module == nullptr) {
    for (const Part& part : parts_)
      if (const auto there = part.module.lock()) check_part(part, *there);
    return;
  }
  std::size_t place = 0;
  const bool same = visit_parameters(*module, [&](const at::Tensor& parameter) {
    return place < in_order_.size() && in_order_[place++].is_same(parameter);
  });
  if (same && place == in_order_.size()) return;
  const torch::OrderedDict<std::string, at::Tensor> now = module->named_parameters();
  for (const auto& item : now)
    if (!is_known(item.value(), in_order_)) refuse_later(item.key());
  refuse_other_number(module_name_, now.size());
}

// A module that is left of a model which is gone.
void RegisteredParameters::check_part(const Part& part, const torch::nn::Module& module) const {
  const auto& now = Registry::parameters_of(module);
  for (const auto& item : now)
    if (!is_known(item.value(), part.own)) refuse_later(part.name + "." + item.key());
  if (now.size() != part.own.size()) refuse_other_number(part.name, now.size());
  for (const auto& child : module.named_children())
    if (!is_part(child.value()))
      for (const auto& item : child.value()->named_parameters())
        refuse_later(fmt::format("{}.{}.{}", part.name, child.key(), item.key()));
}

bool RegisteredParameters::is_part(const std::shared_ptr<torch::nn::Module>& module) const {
  const auto found = part_at_.find(module.get());
  return found != part_at_.end() && parts_[found->second].module.lock() == module;
}

bool RegisteredParameters::any_part_lives() const {
  return !is_gone() || std::ranges::any_of(parts_, [](const Part& part) {
    const auto module = part.module.lock();
    return module != nullptr && !visit_parameters(*module, [](const at::Tensor& parameter) {
             return !parameter.defined();
           });
  });
}

std::vector<at::Tensor> RegisteredParameters::all() const {
  std::vector<at::Tensor> result = in_order_;
  const auto add = [&](const at::Tensor& parameter) {
    result.push_back(parameter);
    return true;
  };
  for (const Shown& one : shown_) result.push_back(one.part);
  if (const auto module = module_.lock())
    visit_parameters(*module, add);
  else
    for (const Part& part : parts_)
      if (const auto there = part.module.lock()) visit_parameters(*there, add);
  return result;
}

void RegisteredParameters::follow_shown() {
  for (Shown& one : shown_) {
    if (one.part.requires_grad() != one.parameter.requires_grad())
      one.part.set_requires_grad(one.parameter.requires_grad());
    if (!one.has_gradient) continue;
    at::Tensor& shown = one.parameter.mutable_grad();
    at::Tensor& gradient = one.part.mutable_grad();
    one.has_gradient = shown.defined() && gradient.defined();
    if (!one.has_gradient) shown = gradient = at::Tensor();
  }
}

void RegisteredParameters::Shown::show() {
  const at::Tensor& gradient = part.grad();
  if (gradient.defined())
    parameter.mutable_grad() = owner->shown_gradient(parameter, gradient);
  else if (has_gradient)
    parameter.mutable_grad() = at::Tensor();
  has_gradient = gradient.defined();
}

void RegisteredParameters::show_gradients() {
  for (Shown& one : shown_) one.show();
}

void RegisteredParameters::show_gradient_of(const c10::TensorImpl* part) {
  for (Shown& one : shown_)
    if (one.part.unsafeGetTensorImpl() == part) one.show();
}

}  // namespace lockstep::data_parallel
