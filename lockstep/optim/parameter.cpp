#include <lockstep/optim/parameter.h>

#include <unordered_map>

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

}  // namespace lockstep::optim
