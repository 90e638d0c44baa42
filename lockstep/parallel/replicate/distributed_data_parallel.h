// Data parallelism: every rank holds the whole model and works on its own samples; gradients are
// summed over all ranks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/data_parallel/parallel_model.h>
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
class DistributedDataParallel final : public data_parallel::ParallelModel {
 public:
  // Without a partition, the optimizer of every rank steps on the whole model. A partition has
  // already moved the parameters to where it steps on them.
  DistributedDataParallel(torch::nn::Module& module, std::shared_ptr<comm::Communicator> group,
                          Options options = {}, data_parallel::ModelContext context = {},
                          std::unique_ptr<data_parallel::OptimizerPartition> partition = nullptr);

  GradientReducer& gradients() const override { return *reducer_; }

  bool every_rank_computes() const override { return false; }
  at::Tensor gradient_norm() override;
  std::vector<NamedTensor> full_optimizer_state(
      const optim::Optimizer& optimizer, const data_parallel::StateDictOptions& options) override;
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state) override;
  std::vector<mesh::HeldTensor> held_state() override;
  void held_state_written() override { reducer_->parameters_written(); }
  std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) override;
  std::shared_ptr<void> full_parameters() override { return nullptr; }
  std::string describe() const override { return partition_->describe(); }
  data_parallel::MemoryReport memory_report() const override;

 private:
  std::unique_ptr<optim::Optimizer> do_make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override;
  void check_step() override;
  void check_own_gradients() override { reducer_->check_same_gradients(); }
  std::vector<optim::NamedParameter> stepped_on() override;
  at::Tensor do_full_gradient(const std::string& name) override;
  std::vector<NamedTensor> do_full_state_dict(
      const data_parallel::StateDictOptions& options) override;
  void do_load_full_state_dict(const std::vector<NamedTensor>& state) override;

  std::shared_ptr<data_parallel::OptimizerPartition> partition_;
  std::shared_ptr<GradientReducer> reducer_;
};

}  // namespace lockstep::replicate
