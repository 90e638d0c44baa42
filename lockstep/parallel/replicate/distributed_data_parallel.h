// Data parallelism: every rank holds the whole model and works on its own samples; gradients are
// those of all samples.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/data_parallel/no_sync.h>
#include <lockstep/parallel/replicate/gradient_reducer.h>
#include <lockstep/parallel/replicate/options.h>

namespace lockstep::replicate {

// Makes any module data parallel, in place and without a wrapper: its forward, its parameters and
// the optimizers over them stay what they are. Weights and buffers become those of rank 0.
//
// The module may be loaded and converted meanwhile (torch::load(), to()), on every rank alike;
// parameters that are registered later are refused by the next backward pass.
//
// Ownership: shares the module's tensors and the group, not the module. The module stays data
// parallel for as long as this lives; after that, backward passes through it throw.
// Threading: as GradientReducer. Failure: UsageError, the same on all ranks, where the module has
// nothing to train or differs between ranks, naming the parameter.
class DistributedDataParallel {
 public:
  // Models that may meet in one graph share `counted_pass`, so that a loss over samples of the one
  // that reaches the other is noticed. `take_back` is GradientReducer's.
  DistributedDataParallel(
      torch::nn::Module& module, std::shared_ptr<comm::Communicator> group, Options options = {},
      CountedPass counted_pass = std::make_shared<CountedPass::element_type>(nullptr),
      std::function<void()> take_back = {});

  // Gradient accumulation: while what it returns lives, gradients stay on the rank.
  data_parallel::NoSync no_sync() { return data_parallel::NoSync(reducer_); }

  // Backward of a loss that is a sum over `count` samples of this rank. The gradients are divided
  // by the number of samples of all ranks (and of all passes under no_sync() since the last
  // exchange), so that they are those of the mean over the whole batch, however it is spread. A
  // rank without samples passes none and an undefined loss, and takes part all the same.
  void backward(const at::Tensor& loss_sum, std::int64_t count);
  // The same of a step whose backward passes, of several micro-batches, `passes` runs; it returns
  // the sum of their losses.
  void backward_passes(const std::function<at::Tensor()>& passes, std::int64_t count) {
    reducer_->backward_passes(passes, count);
  }

  // What the losses given to backward() came to over all ranks, at the last exchange.
  const StepTotals& totals() const { return reducer_->totals(); }

  const GradientReducer& reducer() const { return *reducer_; }
  GradientReducer& reducer() { return *reducer_; }

 private:
  std::shared_ptr<GradientReducer> reducer_;
};

}  // namespace lockstep::replicate
