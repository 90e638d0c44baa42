// A backward pass in two halves: first the gradients that other stages of a pipeline wait for, and
// later the gradients of the weights, for which no stage waits.
#pragma once

#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/nn/module.h>

namespace lockstep::pipeline {

// The second half of a backward pass. Holds the inputs of products with weights and the gradients
// of their results.
//
// If it is destroyed before run(), its gradients are lost. Threading: one thread at a time.
class [[nodiscard]] WeightHalf {
 public:
  // Shared or intrusive, by LibTorch's version.
  using NodePointer = decltype(torch::autograd::Edge::function);

  WeightHalf() = default;  // an empty one
  explicit WeightHalf(std::vector<NodePointer> parts) : parts_(std::move(parts)) {}

  // Adds the gradients of this half to the parameters', in one backward pass of autograd: hooks of
  // parameters, also those of data parallelism, fire as in a whole pass, and callbacks run at its
  // end. May be called once. Parameters may have been freed since forward, but not changed. Hooks
  // may throw; this is then empty.
  void run();

  bool empty() const { return parts_.empty(); }

 private:
  std::vector<NodePointer> parts_;
};

// Cuts backward passes at a module's parameters. Modules and forward passes are not changed, and
// neither is the caller's own backward(): the graph of one pass is cut just before it runs.
//
// Gradients have the bits of a whole pass for any module: the same nodes compute them, with the
// same kernels and in the same order of sums. Everything that is added to a parameter's gradient is
// added by the second half. So over several micro-batches gradients have the bits of whole passes
// in the order of their second halves, whenever the first halves ran.
//
// Products, convolutions, look-ups, and functions that declare it (nn::WeightsMayWait, as in
// nn::ColumnParallelLinear) compute their weights' gradients in the second half. All other
// operators (norms, biases that are added separately, the caller's functions) compute them in the
// first half, which keeps the result: there is little to gain, or they would be computed twice. The
// same goes for products with a weight that is itself computed, as by a weight norm, and for nodes
// with hooks. A function that goes backward inside its own backward (reentrant) adds to gradients
// in the first half. A block of lockstep::recompute runs again in each half: no inputs are kept in
// between, at the cost of one more forward.
//
// Data parallelism sees only second halves: those of all micro-batches but the last run under
// no_sync(). With sharded parameters, the second half of a product needs no weight; that of a
// convolution does, and its unit is gathered.
//
// Ownership: shares the parameters. Threading: one backward_input() at a time; with a GPU,
// autograd's own threads run it.
class SplitBackward {
 public:
  explicit SplitBackward(const torch::nn::Module& module);
  explicit SplitBackward(std::vector<at::Tensor> parameters);

  // The first half: puts the gradients of everything but the parameters, such as the inputs, into
  // .grad(). An undefined gradient stands for 1, for a loss; outputs that require none are left
  // out. The graph is used up, also if this throws.
  WeightHalf backward_input(const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& gradients) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::unordered_set<const c10::TensorImpl*> known_;  // the same parameters
};

}  // namespace lockstep::pipeline
