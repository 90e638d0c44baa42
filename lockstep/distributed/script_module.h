// Models from TorchScript: what Python's torch.jit.script() or torch.jit.trace() exported, as a
// module that trains like any other.
//
//   auto model = dist.wrap_model(torch::jit::load("model.pt"));
//   auto adamw = dist.make_optimizer(model, lockstep::optim::AdamWOptions{});
//   dist.backward(model, loss_of(model->forward(x), y), x.size(0));
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/mesh/tensors.h>

namespace lockstep {

// A torch::jit::Module as a torch::nn::Module. Parameters, buffers and submodules are those of the
// script, under its names. They are shared with it: what training does to one is seen in the other.
// It can be a part of a module in C++, too.
//
// A call runs the script's operators one by one, so that each comes to whoever keeps the
// parameters. TorchScript's optimizer would make kernels of several operators that read memory
// which is not there while a parameter is cut. Call models through this class therefore, and not
// through the torch::jit::Module.
//
// A script may give a buffer another tensor (`self.count = self.count + 1`). After a call its value
// is in the tensor that is registered here; after one that throws, there is the value from before.
// UsageError where it does so to a parameter, or where the other tensor has another shape or type.
//
// Ownership: shares the script. Threading: as the script, which one thread calls at a time.
// Failure: the script's exceptions as TorchScript reports them, but UsageError and CommError as
// they were thrown.
class ScriptModuleImpl : public torch::nn::Module {
 public:
  explicit ScriptModuleImpl(torch::jit::Module script);

  // Runs a script that takes a tensor and returns one. UsageError where it returns something else.
  at::Tensor forward(const at::Tensor& input);
  // Any method, with any inputs and results.
  c10::IValue call(std::vector<c10::IValue> inputs, const std::string& method = "forward");

  const torch::jit::Module& script() const { return script_; }

  void train(bool on = true) override;
  bool is_training() const noexcept override;

 private:
  // A tensor of the script, and where the script looks for it.
  struct Place {
    std::string name;
    torch::jit::ModulePtr holder;
    std::size_t slot;
    at::Tensor tensor;
    bool is_parameter;
  };

  void follow_script();

  torch::jit::Module script_;
  std::vector<Place> places_;
};

TORCH_MODULE(ScriptModule);

namespace internal {

// A module with these tensors. Names with dots are those of modules inside of it. UsageError for a
// name that is not one, or is there twice, and for a parameter that was computed from others.
std::shared_ptr<torch::nn::Module> module_of_tensors(const std::vector<NamedTensor>& parameters,
                                                     const std::vector<NamedTensor>& buffers);

}  // namespace internal

}  // namespace lockstep

namespace lockstep::names {

using lockstep::ScriptModule;

}  // namespace lockstep::names
