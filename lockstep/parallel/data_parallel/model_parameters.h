// The tensors of a module: each once, as weights may be shared, under which names, and whether they
// are still the ones that it had.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/parameter_group.h>

namespace lockstep::data_parallel {

// The tensors of named_parameters() or named_buffers(), each under its first name.
std::vector<NamedTensor> distinct_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& tensors);

// The parameters that require a gradient.
std::vector<NamedTensor> trained_parameters(const torch::nn::Module& module);

// The names of a model's parameters, then of its buffers, as they are when this is made. A tensor
// that is registered in several places has several names.
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

// A module's parameters as they are registered when it is made. A parameter that is registered
// later, or takes another's place, is known to nobody who sums gradients.
//
// Ownership: shares the parameters, not the module. One that belongs to no shared_ptr cannot be
// looked at again, as nobody knows whether it still is.
class RegisteredParameters {
 public:
  explicit RegisteredParameters(torch::nn::Module& module);

  // UsageError that names a parameter which is there now and was not, or says how many are gone.
  // Cheap enough for every backward pass: it compares pointers.
  void check_unchanged() const;

  // All of them, and those that the module has now, some of them twice.
  std::vector<at::Tensor> all() const;

  // Whether somebody can still use the module.
  bool module_lives() const { return !is_shared_ || !module_.expired(); }
  const std::string& module_name() const { return module_name_; }

 private:
  std::weak_ptr<torch::nn::Module> module_;
  bool is_shared_;
  std::string module_name_;
  std::vector<at::Tensor> in_order_;  // with every place in which a module is registered
};

}  // namespace lockstep::data_parallel
