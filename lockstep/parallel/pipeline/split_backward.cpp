#include <lockstep/parallel/pipeline/split_backward.h>

#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/graph_cut.h>

namespace lockstep::pipeline {

namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;

void run_graph(const edge_list& roots, const std::vector<at::Tensor>& gradients) {
  if (roots.empty()) return;
  Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false,
                                       /*create_graph=*/false, /*accumulate_grad=*/true);
}

// As LibTorch's own backward() has it.
at::Tensor one_for(const at::Tensor& output, std::size_t index) {
  if (output.numel() != 1)
    throw UsageError("the output {} of shape {} came without a gradient, and only that of one "
                     "number is 1 by itself: pass the gradient that the next stage sent",
                     index, c10::str(output.sizes()));
  return at::ones_like(output, at::MemoryFormat::Preserve);
}

}  // namespace

void WeightHalf::run() {
  if (parts_.empty()) return;
  // On this thread, as autograd does with what has no gradient on a GPU, and on forward's streams.
  const auto token = at::empty({0});
  const edge_list start = {{make_node<WeightStart>(parts_, token), 0}};
  parts_.clear();
  run_graph(start, {token});
}

SplitBackward::SplitBackward(const torch::nn::Module& module)
    : SplitBackward(module.parameters()) {}

SplitBackward::SplitBackward(std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)) {
  for (const at::Tensor& parameter : parameters_) known_.insert(parameter.unsafeGetTensorImpl());
}

WeightHalf SplitBackward::backward_input(const std::vector<at::Tensor>& outputs,
                                         const std::vector<at::Tensor>& gradients) const {
  if (outputs.size() != gradients.size())
    throw UsageError("{} outputs came with {} gradients: pass one for each, undefined for a loss",
                     outputs.size(), gradients.size());
  edge_list roots;
  std::vector<at::Tensor> starts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    starts.push_back(gradients[i].defined() ? gradients[i] : one_for(outputs[i], i));
    roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
  }
  WeightHalf rest(cut(roots, starts, known_));
  run_graph(roots, starts);
  return rest;
}

}  // namespace lockstep::pipeline
