// A backward pass in two halves: the gradients that other stages of a pipeline wait for first, and
// those of the weights, for which nobody does, when there is time.
#pragma once

#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/parallel/pipeline/half_nodes.h>

namespace lockstep::pipeline {

// What is left of a backward pass after its first half. Holds the inputs of products with weights
// and the gradients of their results.
//
// One that goes without run() takes its gradients with it. Threading: one thread at a time.
class [[nodiscard]] WeightHalf {
 public:
  WeightHalf() = default;  // nothing left
  explicit WeightHalf(std::vector<WeightPartPointer> parts) : parts_(std::move(parts)) {}

  // Adds this pass's part to the parameters' gradients, in one backward pass of autograd's: hooks
  // of parameters fire as in a whole pass, and so do those of data parallelism, and callbacks come
  // at its end. Once; the parameters may have been freed, but not changed, since forward. What
  // fires may throw; nothing is left then.
  void run();

  bool empty() const { return parts_.empty(); }

 private:
  std::vector<WeightPartPointer> parts_;
};

// Cuts backward passes through a module's parameters. Modules and forward passes know nothing of
// it, and a backward() of the caller's own is what it always is: it is the graph of one pass that
// is cut, just before it runs.
//
// Gradients have the bits of a whole pass, whatever the module: the same nodes compute them, with
// the same kernels and in the same order of sums. All that is added to a parameter's gradient is
// added by the second half, so that over several micro-batches gradients have the bits of whole
// passes in the order of their second halves, whenever the first ones ran.
//
// Products, convolutions, look-ups and functions that say that they can (nn::WeightsMayWait, as
// nn::ColumnParallelLinear's does) compute their weights' gradients in the second half. Anything
// else (norms, biases that are added apart, functions of the caller's) does in the first, which
// keeps the result: there is little to gain, or it would be computed twice. So do products with a
// weight that is itself computed, as by a weight norm, and those whose node has hooks. A function
// that goes backward by itself inside of its backward (reentrant) adds to gradients in the first
// half. A block of lockstep::recompute is run again in either half, so that no inputs are
// kept in between, at the cost of one more forward.
//
// Data parallelism sees second halves alone: those of all micro-batches but the last run under
// no_sync(). With sharded parameters the second half of a product asks for no weight; that of a
// convolution does, and has its unit gathered.
//
// Ownership: shares the parameters. Threading: one backward_input() at a time; autograd's own
// threads run it where there is a GPU.
class SplitBackward {
 public:
  explicit SplitBackward(const torch::nn::Module& module);
  explicit SplitBackward(std::vector<at::Tensor> parameters);

  // The first half: gradients of everything but the parameters, as of the inputs, in .grad(). An
  // undefined gradient stands for 1, for a loss; outputs that require none are left out. The graph
  // is used up, also where this throws.
  WeightHalf backward_input(const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& gradients) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::unordered_set<const c10::TensorImpl*> known_;  // the same
};

}  // namespace lockstep::pipeline
