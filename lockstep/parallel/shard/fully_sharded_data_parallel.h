// Sharded data parallelism: every rank works on its own samples and holds a part of the model's
// state; what an operator needs of the rest is there while it runs.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/data_parallel/parallel_model.h>
#include <lockstep/parallel/shard/gradient_sharder.h>
#include <lockstep/parallel/shard/options.h>

namespace lockstep::shard {

using data_parallel::MemoryReport;
using data_parallel::StateDictOptions;

class LowPrecisionOperators;

// Cuts any module's state among ranks, in place and without a wrapper: its forward and its members
// stay what they are. Weights and buffers become those of the first rank. Parameters become
// contiguous. Gradients and optimizer state exist as parts alone: see AbsentGradients for what
// .grad() says, and make_optimizer() for what steps on them.
//
// All ranks run the same operators on sharded parameters in the same order; where one does not, the
// ranks are told by name. Memory behind a parameter's data_ptr() is only there under
// full_parameters().
//
// Ownership: shares the module's tensors and the groups; the module gets a child that refuses
// torch::save(), which would write nothing. Once this is gone, a model with sharded parameters
// cannot be used any more. Threading: as Communicator; backward on any threads of autograd.
// Failure: UsageError, the same on all ranks, where the module has nothing to train or differs
// between ranks; later ones and CommErrors out of whichever operator or backward() they happen in.
class FullyShardedDataParallel final : public data_parallel::ParallelModel {
 public:
  FullyShardedDataParallel(torch::nn::Module& module, Groups groups, Options options = {},
                           data_parallel::ModelContext context = {}, const Origin& origin = {});
  ~FullyShardedDataParallel() override;

  GradientSharder& gradients() const override { return *sharder_; }

  bool every_rank_computes() const override;
  at::Tensor gradient_norm() override;
  std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                const StateDictOptions& options) override;
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state) override;
  std::vector<mesh::HeldTensor> held_state() override;
  void held_state_written() override;
  std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) override;
  std::shared_ptr<void> full_parameters() override;
  std::string describe() const override;
  MemoryReport memory_report() const override;

  const std::vector<std::unique_ptr<FlatUnit>>& units() const { return units_; }
  const Nodes& nodes() const { return nodes_; }
  const ParameterGatherer& gatherer() const { return *gatherer_; }

 private:
  struct Place {
    std::size_t unit = 0;
    std::size_t member = 0;
  };

  std::unique_ptr<optim::Optimizer> do_make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override;
  void check_step() override;
  // A gradient that was not exchanged is refused where it is asked for (GradientSharder::piece).
  void check_own_gradients() override {}
  std::vector<optim::NamedParameter> stepped_on() override;
  at::Tensor do_full_gradient(const std::string& name) override;
  std::vector<NamedTensor> do_full_state_dict(const StateDictOptions& options) override;
  void do_load_full_state_dict(const std::vector<NamedTensor>& state) override;

  void after_step();

  Groups groups_;
  Options options_;
  Nodes nodes_;
  std::string module_name_;
  std::vector<NamedTensor> buffers_;
  std::shared_ptr<BufferPool> gathered_memory_;
  std::vector<std::unique_ptr<FlatUnit>> units_;
  std::unordered_map<std::string, Place> places_;  // of all parameters
  std::vector<Place> in_model_order_;              // of the trained ones
  std::shared_ptr<ParameterGatherer> gatherer_;
  std::shared_ptr<LowPrecisionOperators> low_precision_;  // where operators compute in 16 bits
  std::shared_ptr<GradientSharder> sharder_;
};

}  // namespace lockstep::shard
