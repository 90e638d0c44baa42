// The tensors of a module: each once, as weights may be shared, under which names, and whether they
// are still the ones that it had.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/intercept/owner.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/parameters.h>

namespace lockstep::data_parallel {

// The tensors of named_parameters() or named_buffers(), each under its first name.
std::vector<NamedTensor> distinct_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& tensors);

// A parameter as strategies train it. A layer that was cut over a tensor axis may show its
// parameters whole (intercept::PartOwner): then it is the part on this rank, which takes their
// gradients from now on.
at::Tensor held(const at::Tensor& parameter);
// The parameters of a module, each as held() has it.
torch::OrderedDict<std::string, at::Tensor> held_parameters(const torch::nn::Module& module,
                                                            bool recurse = true);

// The parameters that require a gradient, as held() has them.
std::vector<NamedTensor> trained_parameters(const torch::nn::Module& module);

// The names of a model's parameters, as held() has them, then of its buffers, as they are when this
// is made. A tensor that is registered in several places has several names.
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
  // The groups with the model's names for its parameters, which are what saved state is known by,
  // and with the tensors that are trained in place of those that show them.
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
// A program may keep a part of the module (`auto body = net->body`) and let go of the rest: what is
// left is looked at then.
//
// Ownership: shares the parameters, not the modules. One that belongs to no shared_ptr cannot be
// looked at again, as nobody knows whether it still is.
class RegisteredParameters {
 public:
  explicit RegisteredParameters(torch::nn::Module& module);

  // UsageError that names a parameter which is there now and was not, or says how many are gone.
  // Cheap enough for every backward pass: it compares pointers.
  void check_unchanged() const;

  // All of them, as they are and as held() has them, and those that the module has now, some of
  // them twice.
  std::vector<at::Tensor> all() const;

  // Parameters that stand for their parts show the gradients of these, as they are when one of the
  // first two is called. follow_shown() does to the parts what was done to the parameters since,
  // and the reverse: gradients were dropped (zero_grad()), parameters frozen.
  void show_gradients();
  void show_gradient_of(const c10::TensorImpl* part);
  void follow_shown();

  // Whether somebody can still use the module, or a module in it that has parameters.
  bool any_part_lives() const;
  const std::string& module_name() const { return module_name_; }

 private:
  struct Shown {
    at::Tensor parameter, part;
    std::shared_ptr<intercept::PartOwner> owner;
    bool has_gradient = false;  // whether the parameter shows one

    void show();
  };

  // A module within the module.
  struct Part {
    std::string name;  // in the module
    std::weak_ptr<torch::nn::Module> module;
    std::vector<at::Tensor> own;  // without those of modules in it
  };

  // Whether the module itself is gone. Parts of it may still be there.
  bool is_gone() const { return is_shared_ && module_.expired(); }
  void check_part(const Part& part, const torch::nn::Module& module) const;
  bool is_part(const std::shared_ptr<torch::nn::Module>& module) const;

  std::weak_ptr<torch::nn::Module> module_;
  bool is_shared_;
  std::string module_name_;
  std::vector<at::Tensor> in_order_;  // with every place in which a module is registered
  std::vector<Shown> shown_;
  std::vector<Part> parts_;                               // every module in it, once
  std::unordered_map<const void*, std::size_t> part_at_;  // by address, which others may have later
};

}  // namespace lockstep::data_parallel
