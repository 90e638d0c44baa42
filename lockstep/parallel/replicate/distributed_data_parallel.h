// Data parallelism: every rank holds the whole model and works on its own samples; gradients are
// summed over all ranks.
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
// the optimizers over them stay what they are. Weights and buffers are broadcast from rank 0.
//
// The module may be loaded and converted later (torch::load(), to()), the same on every rank. The
// next backward pass refuses parameters that were registered later.
//
// Ownership: shares the module's tensors and the group, not the module. The module is data parallel
// while this lives; afterwards, backward passes through it throw.
// Threading: as GradientReducer. Failure: UsageError, the same on all ranks, where the module has
// nothing to train or differs between ranks, naming the parameter.
class DistributedDataParallel {
 public:
  // Models that may be in one graph share `counted_pass`, so that a loss over one model's samples
  // that reaches the other model is noticed. `take_back` is GradientReducer's.
  DistributedDataParallel(
      torch::nn::Module& module, std::shared_ptr<comm::Communicator> group, Options options = {},
      CountedPass counted_pass = std::make_shared<CountedPass::element_type>(nullptr),
      std::function<void()> take_back = {});

  // Gradient accumulation: while the result lives, gradients are not exchanged.
  data_parallel::NoSync no_sync() { return data_parallel::NoSync(reducer_); }

  // Backward of a loss that is a sum over `count` samples of this rank. Gradients are divided by
  // the number of samples of all ranks, and of all passes under no_sync() since the last exchange.
  // So they are the gradients of the mean over the whole batch, however it is spread. A rank
  // without samples passes 0 and an undefined loss, and still takes part.
  void backward(const at::Tensor& loss_sum, std::int64_t count);
  // The same for a step of several micro-batches: `passes` runs their backward passes and returns
  // the sum of their losses.
  void backward_passes(const std::function<at::Tensor()>& passes, std::int64_t count) {
    reducer_->backward_passes(passes, count);
  }

  // The sums over all ranks, at the last exchange, of the losses given to backward().
  const StepTotals& totals() const { return reducer_->totals(); }

  const GradientReducer& reducer() const { return *reducer_; }
  GradientReducer& reducer() { return *reducer_; }

 private:
  std::shared_ptr<GradientReducer> reducer_;
};

}  // namespace lockstep::replicate
