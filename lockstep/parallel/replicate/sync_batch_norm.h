// Batch norms whose statistics are those of the whole batch, however it is spread over ranks.
#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/replicate/synced_norm.h>

namespace lockstep::replicate {

// Makes every BatchNorm1d, 2d and 3d inside a module take its mean and variance over the samples of
// all ranks of a group while it trains. The modules stay what they are: tensors of each carry a
// dispatch key that leads LibTorch's batch_norm to us. Loading a module, or moving it to another
// device or dtype, takes the key away, until renew(): the next backward pass of the process throws
// where the module trains.
//
// Every rank makes one of these, before the module becomes data parallel, and then runs the same
// batch norms in the same order, forward and backward. One value per channel on a rank is enough
// where others have more; only a batch norm without running statistics (track_running_stats(false))
// needs two on each rank that has any, since LibTorch's module refuses one before we hear of it.
//
// Ownership: a group of its own, split from the one given; the module is not kept alive. Once this
// is gone, or where a module is evaluated, batch norms are LibTorch's own again. Threading: as
// Communicator.
// Failure: UsageError naming a batch norm that has neither weights nor running statistics, or
// saying why no batch norm can be converted in this process; in forward, on all ranks, where they
// have fewer than two values per channel together.
class SyncBatchNorm {
 public:
  SyncBatchNorm(torch::nn::Module& module, comm::Communicator& group);
  SyncBatchNorm(const SyncBatchNorm&) = delete;
  SyncBatchNorm& operator=(const SyncBatchNorm&) = delete;

  int num_converted() const { return static_cast<int>(norms_.size()); }

  // Whether one of those it converted is inside a module, or is the module.
  bool converted_any_of(const torch::nn::Module& module) const;

  // Once they are where they stay.
  void renew();

  // True once all of them are gone.
  bool expired() const;

 private:
  class Watch;

  bool converted(const torch::nn::Module& norm) const;
  void check_redirected() const;

  std::shared_ptr<const SumOverRanks> sum_;
  struct Converted {
    std::weak_ptr<torch::nn::Module> module;
    std::string name;
    std::shared_ptr<intercept::Owner> owner;
  };
  std::vector<Converted> norms_;
  std::shared_ptr<Watch> watch_;
};

}  // namespace lockstep::replicate
