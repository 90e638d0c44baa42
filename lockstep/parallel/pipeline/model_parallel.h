// The layers of a model on several devices of one process, without micro-batches.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <lockstep/parallel/pipeline/schedule/partition.h>

namespace lockstep::pipeline {

// A Sequential whose children are on several devices of this process: the first ones on the first
// device, and so on. Activations are moved between devices, and autograd moves gradients back. One
// device computes at a time: this is for models that one device cannot hold. Pipe is faster where
// each device can have a process. Losses and gradients are those of one device.
//
//   ModelParallel model(layers, std::vector<c10::Device>{{torch::kCUDA, 0}, {torch::kCUDA, 1}});
//   auto loss = cross_entropy(model->forward(input), target.to(model->output_device()));
//
// Names of parameters are those of the Sequential. Ownership: shares the children, and moves them.
// Threading: as the children. Failure: UsageError for more devices than children, cuts that do
// not fit, and a parameter that children on different devices share.
class ModelParallelImpl : public torch::nn::Module {
 public:
  // If no cuts are given, devices are balanced by the number of parameters.
  ModelParallelImpl(const torch::nn::Sequential& layers, std::vector<c10::Device> devices,
                    Cuts cuts = {});

  // Takes a tensor on any device, and returns one on output_device().
  at::Tensor forward(at::Tensor x);

  const Cuts& cuts() const { return cuts_; }
  c10::Device output_device() const { return devices_.back(); }

 private:
  void check_shared() const;

  std::vector<c10::Device> devices_;
  Cuts cuts_;
  std::vector<torch::nn::Sequential> parts_;  // one for each device
};
TORCH_MODULE(ModelParallel);

}  // namespace lockstep::pipeline
