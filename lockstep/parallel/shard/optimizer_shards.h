// ZeRO-1: every rank holds the whole model and its gradients, and the optimizer's state of a part.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/memory_report.h>
#include <lockstep/parallel/shard/optimizer_state.h>
#include <lockstep/parallel/shard/unit_plan.h>

namespace lockstep::shard {

// Moves a module's parameters into memory that ranks update a part each of and gather the rest of.
// Gradients are whoever's who sums them over the ranks, into .grad(): make that data parallel after
// this.
//
// Ownership: shares the module's tensors and the group. Threading: one thread at a time.
class OptimizerShards {
 public:
  OptimizerShards(torch::nn::Module& module, const std::shared_ptr<comm::Communicator>& group,
                  const UnitPolicy& units = {});

  // As FullyShardedDataParallel's.
  std::unique_ptr<optim::Optimizer> make_optimizer(const optim::OptimizerOptions& options,
                                                   std::vector<optim::ParameterGroup> groups);

  // As FullyShardedDataParallel's.
  std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                const StateDictOptions& options = {});
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state);

  // Parameters that were given other memory, as torch::load() does, come back into this one, where
  // the optimizer steps on them. UsageError for what it could not step on.
  void take_back();

  const std::vector<std::unique_ptr<FlatUnit>>& units() const { return units_; }
  MemoryReport memory_report() const;
  std::string describe() const;

 private:
  std::shared_ptr<comm::Communicator> group_;
  std::string module_name_;
  std::vector<std::unique_ptr<FlatUnit>> units_;
  // Of those that there are.
  std::shared_ptr<std::int64_t> optimizer_bytes_ = std::make_shared<std::int64_t>(0);
};

}  // namespace lockstep::shard
