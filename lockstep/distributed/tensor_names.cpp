#include <lockstep/distributed/tensor_names.h>

#include <utility>

#include <lockstep/base/error.h>

namespace lockstep {

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

}  // namespace lockstep
