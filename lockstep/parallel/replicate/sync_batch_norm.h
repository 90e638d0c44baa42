// Batch norms that take their statistics over the batch of all ranks.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>

namespace lockstep::replicate {

// Sums a tensor over the ranks, in place. Every rank calls it.
using SumOverRanks = std::function<void(const at::Tensor& sums)>;

// Makes every BatchNorm1d, 2d and 3d inside a module take its mean and variance over the samples of
// all ranks of a group while it trains. The modules stay what they are: some tensors of each carry
// a dispatch key that leads LibTorch's batch_norm to us. Loading a module, or moving it to another
// device or dtype, removes the key until renew() is called: the module's next backward pass throws
// if it trains.
//
// Every rank makes one of these, before the module becomes data parallel, and then runs the same
// batch norms in the same order, forward and backward. One value per channel on a rank is enough
// if others have more. Only a batch norm without running statistics (track_running_stats(false))
// needs two on each rank that has any, because LibTorch's module refuses one before it calls us.
//
// Ownership: makes a group of its own by splitting the given one; the module is not kept alive.
// Once this is destroyed, and in evaluation, batch norms are LibTorch's own. Threading: as
// Communicator. Failure: UsageError naming a batch norm that has neither weights nor running
// statistics, or saying why no batch norm can be converted in this process; in forward, on all
// ranks, where they have fewer than two values per channel together.
class SyncBatchNorm {
 public:
  SyncBatchNorm(torch::nn::Module& module, comm::Communicator& group);
  SyncBatchNorm(const SyncBatchNorm&) = delete;
  SyncBatchNorm& operator=(const SyncBatchNorm&) = delete;

  int num_converted() const { return static_cast<int>(norms_.size()); }

  // Whether the module is, or contains, a batch norm that this converted.
  bool converted_any_of(const torch::nn::Module& module) const;

  // Redirects them again, after the model was loaded or moved for the last time.
  void renew();

  // Whether all converted batch norms are destroyed.
  bool expired() const;

 private:
  class Watch;

  bool converted(const torch::nn::Module& norm) const;
  void check_redirected(const intercept::Pass& pass) const;

  std::shared_ptr<const SumOverRanks> sum_;
  struct Converted {
    std::weak_ptr<torch::nn::Module> module;
    std::string name;
    std::shared_ptr<intercept::Owner> owner;
  };
  std::vector<Converted> norms_;
  data_parallel::RegisteredParameters parameters_;
  std::shared_ptr<Watch> watch_;
};

}  // namespace lockstep::replicate
