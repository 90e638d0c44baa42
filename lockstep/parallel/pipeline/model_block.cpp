#include <lockstep/parallel/pipeline/model_block.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <lockstep/recompute/buffer_values.h>
#include <lockstep/recompute/generator_states.h>

namespace lockstep::pipeline {

namespace {

constexpr int kRunsMeasured = 3;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void wait_for_device(const at::Tensor& tensor) {
  // Copying a number to the host waits for what computes it.
  if (!tensor.is_cpu() && tensor.numel() > 0) tensor.reshape({-1})[0].item();
}

// Forward and backward once; `outputs` are what the next block is given.
double seconds_of_block(const ModelBlock& block, const std::vector<at::Tensor>& given,
                        std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> inputs, wanted;
  for (const at::Tensor& one : given) {
    const at::Tensor leaf = one.detach().clone().requires_grad_(one.is_floating_point());
    inputs.push_back(leaf.clone());  // which the block may write into
    if (leaf.requires_grad()) wanted.push_back(leaf);
  }
  for (const auto& module : block.modules)
    for (const at::Tensor& parameter : module->parameters())
      if (parameter.requires_grad()) wanted.push_back(parameter);
  const auto start = std::chrono::steady_clock::now();
  outputs = block.forward(inputs);
  std::vector<at::Tensor> made, slopes;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    made.push_back(output);
    slopes.push_back(at::ones_like(output));
  }
  std::vector<at::Tensor> last = outputs;
  if (!made.empty() && !wanted.empty())
    for (const at::Tensor& gradient :
         torch::autograd::grad(made, wanted, slopes, /*retain_graph=*/false,
                               /*create_graph=*/false, /*allow_unused=*/true))
      if (gradient.defined()) last = {gradient};
  for (const at::Tensor& tensor : last) wait_for_device(tensor);
  for (at::Tensor& output : outputs) output = output.detach();
  return seconds_since(start);
}

}  // namespace

std::vector<ModelBlock> blocks_of(const torch::nn::Sequential& model) {
  std::vector<ModelBlock> blocks;
  torch::nn::Sequential children = model;  // the same ones
  for (torch::nn::AnyModule& child : *children)
    blocks.push_back({{child.ptr()}, [child](const std::vector<at::Tensor>& inputs) mutable {
                        return std::vector<at::Tensor>{child.forward(inputs.at(0))};
                      }});
  return blocks;
}

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return tensors;
}

std::vector<double> num_parameters_of(const std::vector<ModelBlock>& blocks) {
  std::vector<double> numbers;
  for (const ModelBlock& block : blocks) {
    double sum = 0;
    for (const auto& module : block.modules)
      for (const at::Tensor& parameter : module->parameters())
        sum += static_cast<double>(parameter.numel());
    numbers.push_back(sum);
  }
  return numbers;
}

std::vector<double> seconds_of(const torch::nn::Module& model,
                               const std::vector<ModelBlock>& blocks,
                               const std::function<std::vector<at::Tensor>()>& sample) {
  const c10::AutoGradMode with_gradients(true);
  // Also of modules that no block lists: all of them may use those.
  const activations::BufferValues values(model.buffers());
  const auto generators = activations::GeneratorStates::now();
  const std::vector<at::Tensor> first = sample();
  std::vector<double> seconds(blocks.size(), std::numeric_limits<double>::infinity());
  for (int run = 0; run < kRunsMeasured; ++run) {
    std::vector<at::Tensor> x = first;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      std::vector<at::Tensor> outputs;
      seconds[i] = std::min(seconds[i], seconds_of_block(blocks[i], x, outputs));
      x = std::move(outputs);
    }
  }
  values.restore();
  generators.restore();
  return seconds;
}

}  // namespace lockstep::pipeline
