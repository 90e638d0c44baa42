#include <lockstep/parallel/data_parallel/state_match.h>

#include <spdlog/fmt/ranges.h>

namespace lockstep::data_parallel {

namespace {

std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return fmt::format("[{}]", fmt::join(tensor.sizes().begin(), tensor.sizes().end(), ", "));
}

}  // namespace

std::string state_fault(const std::vector<NamedTensor>& wanted,
                        const std::vector<NamedTensor>& given) {
  std::map<std::string, at::Tensor> left = by_name(given);
  if (left.size() != given.size())
    return fmt::format("it has {} tensors of {} names", given.size(), left.size());
  for (const auto& [name, tensor] : wanted) {
    const auto found = left.find(name);
    if (found == left.end()) return fmt::format("'{}' is missing", name);
    if (!found->second.defined() || found->second.sizes() != tensor.sizes())
      return fmt::format("'{}' is of shape {}, and {} is needed", name, shape_of(found->second),
                         shape_of(tensor));
    left.erase(found);
  }
  return left.empty() ? "" : fmt::format("'{}' is not part of it", left.begin()->first);
}

std::map<std::string, at::Tensor> by_name(const std::vector<NamedTensor>& state) {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : state) result[name] = tensor;
  return result;
}

}  // namespace lockstep::data_parallel
