#include <lockstep/optim/parameters.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::optim {

void check_distinct(const std::vector<NamedParameter>& parameters) {
  std::unordered_map<std::string, int> names;
  std::unordered_map<const void*, const std::string*> tensors;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.defined()) throw UsageError("parameter '{}' is an undefined tensor", name);
    if (!names.emplace(name, 0).second)
      throw UsageError("two parameters are called '{}': each needs a name of its own", name);
    const auto [other, added] = tensors.emplace(tensor.unsafeGetTensorImpl(), &name);
    if (!added)
      throw UsageError("parameters '{}' and '{}' are one tensor: pass shared weights once",
                       *other->second, name);
  }
}

at::Tensor gradient_of(const NamedParameter& parameter) {
  const auto& [name, tensor] = parameter;
  at::Tensor gradient = tensor.grad();
  if (!gradient.defined()) return gradient;
  if (gradient.layout() != at::kStrided)
    throw UsageError("the gradient of '{}' is sparse, which is not supported: make its embedding "
                     "with sparse(false)",
                     name);
  if (gradient.sizes() != tensor.sizes() || gradient.scalar_type() != tensor.scalar_type() ||
      gradient.device() != tensor.device())
    throw UsageError("the gradient of '{}' is {} on {}, but the parameter is {} on {}", name,
                     type_and_shape(gradient), gradient.device().str(), type_and_shape(tensor),
                     tensor.device().str());
  if (gradient.numel() > 0 && gradient.storage().data() == nullptr)
    throw UsageError(
        "the gradient of '{}' has no memory here, as where a model is sharded and each "
        "rank has a part of it: step with the optimizer of that model's "
        "make_optimizer(), and clip with its clip_gradients()",
        name);
  return gradient;
}

std::string type_and_shape(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "));
}

std::vector<ParameterGroup> decay_groups(std::vector<NamedParameter> parameters,
                                         double weight_decay, DecayRule rule) {
  check_distinct(parameters);
  ParameterGroup decaying{.weight_decay = weight_decay};
  ParameterGroup free{.weight_decay = 0};
  for (NamedParameter& parameter : parameters) {
    const bool decays = rule == DecayRule::everything || parameter.tensor.dim() >= 2;
    (decays ? decaying : free).parameters.push_back(std::move(parameter));
  }
  std::vector<ParameterGroup> groups;
  for (ParameterGroup* group : {&decaying, &free})
    if (!group->parameters.empty()) groups.push_back(std::move(*group));
  return groups;
}

namespace {

// A person reads the first few; the number of the others tells the rest.
constexpr std::size_t kDifferencesShown = 5;

[[noreturn]] void refuse(std::vector<std::string> differences) {
  const std::size_t more = differences.size() - std::min(differences.size(), kDifferencesShown);
  differences.resize(differences.size() - more);
  throw UsageError("the saved state is not this optimizer's: {}{}; load it with the optimizer and "
                   "the model that it was saved with",
                   fmt::join(differences, ", "),
                   more == 0 ? std::string() : fmt::format(", and {} more", more));
}

}  // namespace

std::vector<at::Tensor> match_saved_state(const std::vector<NamedTensor>& needed,
                                          const std::vector<NamedTensor>& saved) {
  std::vector<std::string> differences;
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : saved)
    if (!by_name.emplace(name, tensor).second)
      differences.push_back(fmt::format("'{}' is there twice", name));
  std::vector<at::Tensor> matched;
  for (const auto& [name, tensor] : needed) {
    const auto found = by_name.extract(name);
    if (!found || !found.mapped().defined()) {
      differences.push_back(fmt::format("'{}' is missing", name));
      continue;
    }
    const at::Tensor& candidate = found.mapped();
    if (candidate.sizes() != tensor.sizes() || candidate.scalar_type() != tensor.scalar_type())
      differences.push_back(fmt::format("'{}' is {} instead of {}", name, type_and_shape(candidate),
                                        type_and_shape(tensor)));
    matched.push_back(candidate);
  }
  for (const auto& [name, tensor] : saved)
    if (by_name.erase(name) != 0) differences.push_back(fmt::format("'{}' is unknown", name));
  if (!differences.empty()) refuse(std::move(differences));
  return matched;
}

}  // namespace lockstep::optim
