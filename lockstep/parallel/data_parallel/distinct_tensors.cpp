#include <lockstep/parallel/data_parallel/distinct_tensors.h>

#include <unordered_set>

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

}  // namespace lockstep::data_parallel
