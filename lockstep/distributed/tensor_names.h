// The names of a model's tensors: one that is registered in several places has several.
#pragma once

#include <cstddef>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/parameter_group.h>

namespace lockstep {

// Of the parameters, then of the buffers, as they are when it is made.
class TensorNames {
 public:
  explicit TensorNames(const torch::nn::Module& module);

  // Under each name they have, as a checkpoint of the module has them.
  const std::vector<NamedTensor>& all() const { return all_; }
  // Each once, under its first name.
  std::vector<NamedTensor> distinct() const;
  std::vector<NamedTensor> distinct_parameters() const;
  std::vector<NamedTensor> distinct_buffers() const;
  std::vector<NamedTensor> trained() const;

  // A list with one of each becomes one with every name, and the reverse. The reverse leaves names
  // that are not the model's where they are.
  std::vector<NamedTensor> with_every_name(const std::vector<NamedTensor>& distinct) const;
  std::vector<NamedTensor> with_first_names(const std::vector<NamedTensor>& all) const;

  const at::Tensor& tensor(const std::string& name) const { return all_[by_name_.at(name)].tensor; }
  // UsageError where the model has no parameter of this name.
  const at::Tensor& parameter(const std::string& name) const;
  // The first of a parameter's names.
  const std::string& first_name(const std::string& name) const;
  // The groups with the model's names for its parameters: they are what saved state is known by.
  std::vector<optim::ParameterGroup> renamed(std::vector<optim::ParameterGroup> groups) const;

  bool has(const at::Tensor& tensor) const {
    return by_tensor_.contains(tensor.unsafeGetTensorImpl());
  }

 private:
  bool is_first(std::size_t index) const { return firsts_[index] == index; }

  std::vector<NamedTensor> all_;
  std::vector<std::size_t> firsts_;  // of each, the first that is the same tensor
  std::size_t num_parameters_ = 0;
  std::unordered_map<std::string, std::size_t> by_name_;
  std::unordered_map<const void*, std::size_t> by_tensor_;  // the first of each
};

}  // namespace lockstep
