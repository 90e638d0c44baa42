// Batch norms whose statistics are those of the whole batch, however it is spread over ranks.
#pragma once

#include <memory>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::replicate {

// Makes every BatchNorm1d, 2d and 3d inside a module take its mean and variance over the samples of
// all ranks of a group while it trains. The modules stay what they are: one of the tensors of each
// carries a dispatch key that leads LibTorch's batch_norm to us.
//
// Every rank makes one of these, before the module becomes data parallel, and then runs the same
// batch norms in the same order, forward and backward, with at least one sample.
//
// Ownership: a group of its own, split from the one given; once this is gone, or where a module is
// evaluated, batch norms are LibTorch's own again. Threading: as Communicator.
// Failure: UsageError naming a batch norm that has neither weights nor running statistics.
class SyncBatchNorm {
 public:
  SyncBatchNorm(torch::nn::Module& module, comm::Communicator& group);
  ~SyncBatchNorm();
  SyncBatchNorm(const SyncBatchNorm&) = delete;
  SyncBatchNorm& operator=(const SyncBatchNorm&) = delete;

  int num_converted() const { return num_converted_; }

 private:
  std::shared_ptr<comm::Communicator> group_;
  int num_converted_ = 0;
};

}  // namespace lockstep::replicate
