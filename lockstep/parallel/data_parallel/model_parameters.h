// The parameters of a module: each once, as weights may be shared, and whether they are still the
// ones that it had.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/mesh/tensors.h>

namespace lockstep::data_parallel {

// The tensors of named_parameters() or named_buffers(), each under its first name.
std::vector<NamedTensor> distinct_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& tensors);

// The parameters that require a gradient.
std::vector<NamedTensor> trained_parameters(const torch::nn::Module& module);

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
