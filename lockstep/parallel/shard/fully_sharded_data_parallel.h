// Sharded data parallelism: every rank works on its own samples and holds a part of the model's
// state; what an operator needs of the rest is there while it runs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/optim/clip.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/data_parallel/counted_loss.h>
#include <lockstep/parallel/data_parallel/no_sync.h>
#include <lockstep/parallel/shard/gradient_sharder.h>
#include <lockstep/parallel/shard/groups.h>
#include <lockstep/parallel/shard/memory_report.h>
#include <lockstep/parallel/shard/optimizer_state.h>
#include <lockstep/parallel/shard/options.h>

namespace lockstep::shard {

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
class FullyShardedDataParallel {
 public:
  FullyShardedDataParallel(torch::nn::Module& module, Groups groups, Options options = {},
                           data_parallel::CountedPass counted_pass =
                               std::make_shared<data_parallel::CountedPass::element_type>(nullptr),
                           const Origin& origin = {});
  ~FullyShardedDataParallel();
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;

  // Gradient accumulation without communication: while what it returns lives, gradients stay on the
  // rank, whole.
  data_parallel::NoSync no_sync() { return data_parallel::NoSync(sharder_); }

  // Backward of a loss that is a sum over `count` samples of this rank: gradients are divided by
  // the samples of all ranks. With sharded parameters every rank computes in every pass: one
  // without samples takes any and passes their loss times 0, and a count of 0.
  void backward(const at::Tensor& loss_sum, std::int64_t count);
  // The same of a step whose backward passes, of several micro-batches, `passes` runs; it returns
  // the sum of their losses. Gradients are whole on each rank until the last.
  void backward_passes(const std::function<at::Tensor()>& passes, std::int64_t count);
  const data_parallel::StepTotals& totals() const;

  // Steps on this rank's parts and brings the parameters up to date. The groups hold the module's
  // own parameters; UsageError for any other. Its state is this rank's part, flat, under the
  // parameters' names. Outlived by this.
  std::unique_ptr<optim::Optimizer> make_optimizer(const optim::OptimizerOptions& options,
                                                   std::vector<optim::ParameterGroup> groups);

  // As optim::clip_gradients over the whole model; the same bits as without shards. All ranks that
  // cut the model among them answer for the same parameters.
  optim::ClipResult clip_gradients(double max_norm, const optim::NormScope& scope = {});
  // As optim::gradient_norm, in the same way.
  at::Tensor gradient_norm(const optim::NormScope& scope = {});

  // Divides every part of every gradient by the scale, once all of a step's passes are done and
  // before clipping; gives 1 in a tensor of one element where one overflowed on any rank, for
  // GradScaler::update(), and 0 otherwise.
  at::Tensor unscale_gradients(optim::GradScaler& scaler);

  // The whole gradient of a parameter, on every rank; undefined where there is none.
  at::Tensor full_gradient(const std::string& name);

  // While it lives, all parameters are on every rank, for code that reads or writes them through
  // pointers. Outlived by this.
  std::unique_ptr<ParameterGatherer::Hold> full_parameters();

  // Every distinct parameter and buffer, whole: on the first rank, the others get none; unit by
  // unit, so that beside the result one unit is there at a time.
  std::vector<NamedTensor> full_state_dict(const StateDictOptions& options = {});
  // The reverse: the first rank has all of them, and other ranks' lists are not looked at.
  // UsageError on all ranks naming what is missing, unknown or of another shape.
  void load_full_state_dict(const std::vector<NamedTensor>& state);

  // What this rank has of every distinct parameter and buffer: the memory itself. Who writes to it
  // says so afterwards, on every rank, before anything else is done with the model.
  std::vector<mesh::HeldTensor> held_state() const;
  void held_state_written();

  // What an optimizer of make_optimizer() has to save, whole, as full_state_dict() has the model;
  // and the reverse.
  std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                const StateDictOptions& options = {});
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state);

  // Whether parameters are cut, so that every rank has to run what any of them runs.
  bool every_rank_computes() const;

  // The units, their sizes and where they lie, as a table.
  std::string describe() const;
  MemoryReport memory_report() const;

  const std::vector<std::unique_ptr<FlatUnit>>& units() const { return units_; }
  const Nodes& nodes() const { return nodes_; }
  const ParameterGatherer& gatherer() const { return *gatherer_; }
  const GradientSharder& gradients() const { return *sharder_; }
  GradientSharder& gradients() { return *sharder_; }

 private:
  struct Place {
    std::size_t unit = 0;
    std::size_t member = 0;
  };

  Place find(const std::string& name) const;
  void check_step();
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
  // Bytes of the state of the optimizers that there are.
  std::shared_ptr<std::int64_t> optimizer_bytes_ = std::make_shared<std::int64_t>(0);
};

}  // namespace lockstep::shard
