// The interface of a model that is spread over ranks, whichever strategy spreads it:
// DistributedManager calls it; replicate and shard implement it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/clip.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/data_parallel/counted_loss.h>
#include <lockstep/parallel/data_parallel/gradient_exchange.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/data_parallel/model_state.h>

namespace lockstep::data_parallel {

// How ranks share the work of an optimizer where all of them hold the whole model and its
// gradients.
class OptimizerPartition {
 public:
  virtual ~OptimizerPartition() = default;

  // ParallelModel's functions of these names say what they do.
  virtual std::unique_ptr<optim::Optimizer> make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) = 0;
  virtual std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                        const StateDictOptions& options) = 0;
  virtual void load_full_optimizer_state(optim::Optimizer& optimizer,
                                         const std::vector<NamedTensor>& state) = 0;
  virtual std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) = 0;

  // Parameters that were given other memory, as torch::load() does, come back to where the
  // optimizer steps on them. UsageError for what it could not step on.
  virtual void take_back() = 0;

  virtual std::string describe() const = 0;
  virtual MemoryReport memory_report() const = 0;  // without buffers and the optimizer's state
};

// A job's settings for the strategy of each of its models.
struct ModelContext {
  // Models that may be in one graph share it, so that a loss over one model's samples that reaches
  // the other model is noticed.
  CountedPass counted_pass = std::make_shared<CountedPass::element_type>(nullptr);
  // For norms, where ranks along other axes have further parts of the model.
  optim::NormScope norm_scope = {};
};

// A module that a strategy has spread over ranks, in place and without a wrapper. What all
// strategies do alike is written here; they say how gradients, parameters and the optimizer's state
// lie on the ranks. Every rank calls the same functions at the same points.
//
// Ownership: shares the module's tensors and the group, not the module. Threading: one thread at a
// time. Failure: UsageError, the same on all ranks, for what the caller can mend; CommError.
class ParallelModel {
 public:
  virtual ~ParallelModel() = default;
  ParallelModel(const ParallelModel&) = delete;
  ParallelModel& operator=(const ParallelModel&) = delete;

  // The names of its tensors, as they were when the model was spread.
  const TensorNames& names() const { return names_; }

  // Follows what was done to the model since it was looked at last. UsageError where it would be
  // trained on each rank by itself: parameters that were registered later, memory that is nobody's.
  void check_model() { gradients().check_model(); }
  // Whether anybody can still use the model, or a part of it. Its gradients are summed over the
  // ranks for as long.
  bool any_part_lives() const { return gradients().any_part_lives(); }
  // Every so many exchanges of gradients ranks compare what they hold; never where it is 0.
  void check_consistency_every(std::int64_t exchanges) {
    gradients().check_consistency_every(exchanges);
  }

  // Backward of a loss that is a sum over `count` samples of this rank. Gradients are divided by
  // the number of samples of all ranks, and of all passes of the step: those before this one that
  // were under accumulate() or no_sync().
  // So they are the gradients of the mean over the whole batch, however it is spread. A rank
  // without samples passes a count of 0: with an undefined loss, or where every rank computes, with
  // the loss of any sample times 0.
  void backward(const at::Tensor& loss_sum, std::int64_t count);
  // The same for a step of several micro-batches: `passes` runs their backward passes and returns
  // the sum of their losses. Gradients are exchanged after the last.
  void backward_passes(const std::function<CountedSum()>& passes) {
    gradients().backward_passes(passes);
  }
  // Gradient accumulation: while the result lives, further passes of the step follow. Their
  // gradients are exchanged after each pass where gradients are cut, and after the last elsewhere;
  // exchange_each_pass() says otherwise.
  Accumulation accumulate() { return Accumulation(gradients().shared_from_this()); }
  void exchange_each_pass(bool on) { gradients().exchange_each_pass(on); }
  // While the result lives, no pass exchanges gradients.
  NoSync no_sync() { return NoSync(gradients().shared_from_this()); }
  // The sums over all ranks, at the last exchange, of the losses given to backward().
  const StepTotals& totals() const { return gradients().totals(); }

  // Whether parameters are cut, so that every rank has to run what any of them runs.
  virtual bool every_rank_computes() const = 0;

  // Steps on what this rank has of the parameters; its state is this rank's, under the model's
  // names. The groups hold the module's own parameters, whole. It throws a UsageError, whatever it
  // is asked, once this is gone.
  std::unique_ptr<optim::Optimizer> make_optimizer(const optim::OptimizerOptions& options,
                                                   std::vector<optim::ParameterGroup> groups);

  // The norm of the whole model's gradients, the same bits however it is cut; and clipping by it,
  // as optim::clip_gradients().
  virtual at::Tensor gradient_norm() = 0;
  optim::ClipResult clip_gradients(double max_norm);
  // Divides the gradients by the scale, once all of a step's passes are done and before clipping.
  // Returns 1 in a tensor of one element where one overflowed on any rank, for
  // GradScaler::update(), and 0 otherwise.
  at::Tensor unscale_gradients(optim::GradScaler& scaler);
  // A copy of a parameter's whole gradient, on every rank; undefined where there is none.
  at::Tensor full_gradient(const std::string& name);

  // Copies of all tensors, whole, under every name they have. One unit of a model that is cut is
  // there at a time.
  std::vector<NamedTensor> full_state_dict(const StateDictOptions& options = {});
  // The reverse: the first rank has all of them, and other ranks' lists are not looked at.
  // UsageError on all ranks naming what is missing, unknown or of another shape.
  void load_full_state_dict(const std::vector<NamedTensor>& state);
  // The same of an optimizer of make_optimizer().
  virtual std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                        const StateDictOptions& options) = 0;
  virtual void load_full_optimizer_state(optim::Optimizer& optimizer,
                                         const std::vector<NamedTensor>& state) = 0;

  // This rank's part of every distinct parameter and buffer: the memory itself. A caller that
  // writes to it calls held_state_written() on every rank, before anything else is done with the
  // model.
  virtual std::vector<mesh::HeldTensor> held_state() = 0;
  virtual void held_state_written() = 0;
  virtual std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) = 0;

  // While the result lives, all parameters are whole on every rank, for code that uses them through
  // pointers. What was written to them meanwhile lasts. Null where they are whole anyway. The model
  // outlives it.
  virtual std::shared_ptr<void> full_parameters() = 0;

  // The units, their sizes and where they lie, as text.
  virtual std::string describe() const = 0;
  virtual MemoryReport memory_report() const = 0;

 protected:
  // `group` has every rank that has samples of its own.
  ParallelModel(const torch::nn::Module& module, std::shared_ptr<comm::Communicator> group,
                ModelContext context);

  comm::Communicator& group() const { return *group_; }
  const ModelContext& context() const { return context_; }
  // Bytes of the state of the optimizers that there are.
  std::int64_t optimizer_bytes() const { return *optimizer_bytes_; }
  // Where operators use the parameters.
  c10::Device device() const { return names_.all().front().tensor.device(); }

 private:
  class ModelOptimizer;

  virtual GradientExchange& gradients() const = 0;
  virtual std::unique_ptr<optim::Optimizer> do_make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) = 0;
  // Before an optimizer steps: UsageError where ranks would step apart.
  virtual void check_step() = 0;
  // The same before a step that no exchange of gradients has come before since the optimizer's last
  // one, so that the gradients are a program's own. Every rank calls it.
  virtual void check_own_gradients() = 0;
  // The parts of trained parameters that this rank steps on, with their gradients.
  virtual std::vector<optim::NamedParameter> stepped_on() = 0;
  // Each tensor is known by the first of its names here.
  virtual at::Tensor do_full_gradient(const std::string& name) = 0;
  virtual std::vector<NamedTensor> do_full_state_dict(const StateDictOptions& options) = 0;
  virtual void do_load_full_state_dict(const std::vector<NamedTensor>& state) = 0;

  TensorNames names_;
  std::shared_ptr<comm::Communicator> group_;
  ModelContext context_;
  // Optimizers know by it whether this lives.
  const std::shared_ptr<std::int64_t> optimizer_bytes_ = std::make_shared<std::int64_t>(0);
};

}  // namespace lockstep::data_parallel
