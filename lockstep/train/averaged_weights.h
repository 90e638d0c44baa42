// The exponential moving average of a model's weights.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/distributed/distributed.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::train {

// After each step, average ← decay · average + (1 − decay) · weights. It begins as the weights are.
// Each rank averages the parts that it holds, those of 16 bits in float32; buffers are not
// averaged.
//
// Ownership: shares the model and the job; owns as much memory as the averages of this rank's
// weights take, and a copy of the weights while work runs in their place. Threading: one thread.
// Failure: CommError.
class AveragedWeights {
 public:
  AveragedWeights(DistributedManager dist, std::shared_ptr<torch::nn::Module> model, double decay);

  // `factor`: one Double, 0 if the step left the weights as they are, which only the device knows.
  void update(const at::Tensor& factor);
  // Forgets the average: it is what the weights are now.
  void begin();

  // This rank's parts, as "average/<name>": the memory itself.
  std::vector<mesh::HeldTensor> held() const;

  // Runs `work` with the average in place of the weights, on all ranks.
  void in_place_of_weights(const std::function<void()>& work);

 private:
  std::vector<mesh::HeldTensor> weights() const;
  void set_weights(const std::vector<at::Tensor>& values);

  mutable DistributedManager dist_;
  std::shared_ptr<torch::nn::Module> model_;
  double decay_;
  std::vector<at::Tensor> averages_;  // in the order of weights()
};

}  // namespace lockstep::train
