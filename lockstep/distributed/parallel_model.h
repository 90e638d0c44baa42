// What a strategy makes of a model, whichever it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/distributed/axes/job_axes.h>
#include <lockstep/distributed/config.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/clip.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/parameter_group.h>
#include <lockstep/parallel/data_parallel/counted_loss.h>
#include <lockstep/parallel/data_parallel/no_sync.h>
#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/memory_report.h>
#include <lockstep/parallel/shard/optimizer_state.h>

namespace lockstep {

// The ranks along one or several axes; null along none.
std::shared_ptr<comm::Communicator> group_along(mesh::DeviceMesh& mesh,
                                                const std::vector<std::string>& axes);

// The names of a model's parameters, then of its buffers, as they are when this is made. A tensor
// that is registered in several places has several names.
class TensorNames {
 public:
  explicit TensorNames(const torch::nn::Module& module);

  // Under each name they have, as a checkpoint of the module has them.
  const std::vector<NamedTensor>& all() const { return all_; }
  // Each once, under its first name.
  std::vector<NamedTensor> distinct() const;
  std::vector<NamedTensor> distinct_parameters() const;
  std::vector<NamedTensor> distinct_buffers() const;
  std::vector<NamedTensor> trained() const;

  // A list with one of each becomes one with every name, and the reverse. The reverse leaves names
  // that are not the model's where they are.
  std::vector<NamedTensor> with_every_name(const std::vector<NamedTensor>& distinct) const;
  std::vector<NamedTensor> with_first_names(const std::vector<NamedTensor>& all) const;

  const at::Tensor& tensor(const std::string& name) const { return all_[by_name_.at(name)].tensor; }
  // UsageError where the model has no parameter of this name.
  const at::Tensor& parameter(const std::string& name) const;
  // The first of a parameter's names.
  const std::string& first_name(const std::string& name) const;
  // The groups with the model's names for its parameters: they are what saved state is known by.
  std::vector<optim::ParameterGroup> renamed(std::vector<optim::ParameterGroup> groups) const;

  bool has(const at::Tensor& tensor) const {
    return by_tensor_.contains(tensor.unsafeGetTensorImpl());
  }

 private:
  bool is_first(std::size_t index) const { return firsts_[index] == index; }

  std::vector<NamedTensor> all_;
  std::vector<std::size_t> firsts_;  // of each, the first that is the same tensor
  std::size_t num_parameters_ = 0;
  std::unordered_map<std::string, std::size_t> by_name_;
  std::unordered_map<const void*, std::size_t> by_tensor_;  // the first of each
};

using shard::MemoryReport;
using shard::StateDictOptions;

// DistributedManager's methods of the same names say what these do.
class ParallelModel {
 public:
  virtual ~ParallelModel() = default;

  // Follows what was done to the model since it was looked at last. UsageError where it would be
  // trained on each rank by itself: parameters that were registered later, memory that is nobody's.
  virtual void check_model() = 0;
  // Every so many exchanges of gradients ranks compare what they hold; never where it is 0.
  virtual void check_consistency_every(std::int64_t exchanges) = 0;

  virtual void backward(const at::Tensor& loss_sum, std::int64_t count) = 0;
  virtual void backward_passes(const std::function<at::Tensor()>& passes, std::int64_t count) = 0;
  virtual data_parallel::NoSync no_sync() = 0;
  virtual const data_parallel::StepTotals& totals() const = 0;

  // One that throws a UsageError whatever it is asked once this is gone.
  std::unique_ptr<optim::Optimizer> make_optimizer(const optim::OptimizerOptions& options,
                                                   std::vector<optim::ParameterGroup> groups);
  virtual optim::ClipResult clip_gradients(double max_norm) = 0;
  virtual at::Tensor gradient_norm() = 0;
  // 1 in a tensor of one element where a gradient overflowed on any rank, and 0 otherwise.
  virtual at::Tensor unscale_gradients(optim::GradScaler& scaler) = 0;
  virtual at::Tensor full_gradient(const std::string& name) = 0;

  virtual std::vector<NamedTensor> full_state_dict(const StateDictOptions& options) = 0;
  virtual void load_full_state_dict(const std::vector<NamedTensor>& state) = 0;
  virtual std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                        const StateDictOptions& options) = 0;
  virtual void load_full_optimizer_state(optim::Optimizer& optimizer,
                                         const std::vector<NamedTensor>& state) = 0;

  // What this rank has of them, among those that data is spread over.
  virtual std::vector<mesh::HeldTensor> held_state() = 0;
  virtual void held_state_written() = 0;
  virtual std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) = 0;

  virtual std::shared_ptr<void> full_parameters() = 0;
  virtual bool every_rank_computes() const = 0;
  virtual std::string describe() const = 0;
  virtual MemoryReport memory_report() const = 0;

  // As they were when it was made.
  virtual const TensorNames& names() const = 0;

 private:
  virtual std::unique_ptr<optim::Optimizer> do_make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) = 0;
  // Before an optimizer steps.
  virtual void check_step() = 0;

  friend std::unique_ptr<ParallelModel> make_parallel(
      torch::nn::Module& module, mesh::DeviceMesh& mesh, const JobAxes& axes,
      const DistributedConfig& config, const data_parallel::CountedPass& counted_pass,
      const optim::NormScope& scope, const shard::Origin& origin);

  bool layers_are_cut_ = false;
  const std::shared_ptr<void> alive_ = std::make_shared<char>();
};

// Spreads a module over the ranks of a mesh along those axes that data is spread over; `scope` is
// for what ranks along the others have.
std::unique_ptr<ParallelModel> make_parallel(torch::nn::Module& module, mesh::DeviceMesh& mesh,
                                             const JobAxes& axes, const DistributedConfig& config,
                                             const data_parallel::CountedPass& counted_pass,
                                             const optim::NormScope& scope = {},
                                             const shard::Origin& origin = {});

}  // namespace lockstep
