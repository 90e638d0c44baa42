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
