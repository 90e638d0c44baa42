#include <lockstep/parallel/pipeline/stage_graph.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::pipeline {

namespace {

struct Entrance : torch::autograd::Function<Entrance> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& leaf) {
    return leaf.tensor_data();
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* /*context*/,
                                          std::vector<at::Tensor> gradients) {
    return gradients;
  }
};

}  // namespace

std::vector<at::Tensor> leaves_of(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& output : outputs)
    inputs.push_back(output.detach().requires_grad_(output.requires_grad()));
  return inputs;
}

std::vector<at::Tensor> entered(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& leaf : leaves)
    inputs.push_back(leaf.requires_grad() ? Entrance::apply(leaf) : leaf);
  return inputs;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& leaf : leaves)
    gradients.push_back(leaf.requires_grad() && !leaf.grad().defined() ? at::zeros_like(leaf)
                                                                       : leaf.grad());
  return gradients;
}

void backward_whole(const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> roots, starts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    roots.push_back(outputs[i]);
    starts.push_back(gradients[i]);
  }
  if (!roots.empty()) torch::autograd::backward(roots, starts);
}

}  // namespace lockstep::pipeline
