// ZeRO-1: every rank holds the whole model and its gradients, and the optimizer's state of a part.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/data_parallel/parallel_model.h>
#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/unit_plan.h>

namespace lockstep::shard {

using data_parallel::MemoryReport;
using data_parallel::StateDictOptions;

// Moves a module's parameters into memory of which each rank updates a part and gathers the rest.
// This class does not reduce gradients: give it to replicate::DistributedDataParallel, which sums
// them into .grad().
//
// Ownership: shares the module's tensors and the group. Threading: one thread at a time.
class OptimizerShards final : public data_parallel::OptimizerPartition {
 public:
  OptimizerShards(torch::nn::Module& module, const std::shared_ptr<comm::Communicator>& group,
                  const UnitPolicy& units = {});

  std::unique_ptr<optim::Optimizer> make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override;
  std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                const StateDictOptions& options) override;
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state) override;
  std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) override;

  void take_back() override;

  std::string describe() const override;
  MemoryReport memory_report() const override;

 private:
  std::shared_ptr<comm::Communicator> group_;
  std::string module_name_;
  std::vector<std::unique_ptr<FlatUnit>> units_;
};

}  // namespace lockstep::shard
