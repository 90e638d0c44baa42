#include <lockstep/distributed/parallel_model.h>

#include <algorithm>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/optim/checked_optimizer.h>
#include <lockstep/optim/counted_optimizer.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>

namespace lockstep {

std::shared_ptr<comm::Communicator> group_along(mesh::DeviceMesh& mesh,
                                                const std::vector<std::string>& axes) {
  if (axes.empty()) return nullptr;
  return axes.size() == 1 ? mesh.axis(axes.front()) : mesh.flatten(axes);
}

TensorNames::TensorNames(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) all_.push_back({item.key(), item.value()});
  num_parameters_ = all_.size();
  for (const auto& item : module.named_buffers()) all_.push_back({item.key(), item.value()});
  for (std::size_t i = 0; i < all_.size(); ++i) {
    by_name_[all_[i].name] = i;
    firsts_.push_back(
        by_tensor_.try_emplace(all_[i].tensor.unsafeGetTensorImpl(), i).first->second);
  }
}

std::vector<NamedTensor> TensorNames::distinct() const {
  std::vector<NamedTensor> result = distinct_parameters();
  for (NamedTensor& buffer : distinct_buffers()) result.push_back(std::move(buffer));
  return result;
}

std::vector<NamedTensor> TensorNames::distinct_parameters() const {
  std::vector<NamedTensor> result;
  for (std::size_t i = 0; i < num_parameters_; ++i)
    if (is_first(i)) result.push_back(all_[i]);
  return result;
}

std::vector<NamedTensor> TensorNames::distinct_buffers() const {
  std::vector<NamedTensor> result;
  for (std::size_t i = num_parameters_; i < all_.size(); ++i)
    if (is_first(i)) result.push_back(all_[i]);
  return result;
}

std::vector<NamedTensor> TensorNames::trained() const {
  std::vector<NamedTensor> result = distinct_parameters();
  std::erase_if(result, [](const NamedTensor& one) { return !one.tensor.requires_grad(); });
  return result;
}

std::vector<NamedTensor> TensorNames::with_every_name(
    const std::vector<NamedTensor>& distinct) const {
  std::unordered_map<std::string, at::Tensor> given;
  for (const auto& [name, tensor] : distinct) given[name] = tensor;
  std::vector<NamedTensor> result;
  for (std::size_t i = 0; i < all_.size(); ++i)
    if (const auto found = given.find(all_[firsts_[i]].name); found != given.end())
      result.push_back({all_[i].name, found->second});
  return result;
}

std::vector<NamedTensor> TensorNames::with_first_names(const std::vector<NamedTensor>& all) const {
  std::vector<NamedTensor> result;
  for (const NamedTensor& given : all) {
    const auto found = by_name_.find(given.name);
    if (found == by_name_.end() || is_first(found->second)) result.push_back(given);
  }
  return result;
}

const at::Tensor& TensorNames::parameter(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end() || found->second >= num_parameters_)
    throw UsageError("the model has no parameter '{}'; named_parameters() lists them", name);
  return all_[found->second].tensor;
}

const std::string& TensorNames::first_name(const std::string& name) const {
  return all_[by_tensor_.at(parameter(name).unsafeGetTensorImpl())].name;
}

std::vector<optim::ParameterGroup> TensorNames::renamed(
    std::vector<optim::ParameterGroup> groups) const {
  for (optim::ParameterGroup& group : groups)
    for (optim::NamedParameter& parameter : group.parameters)
      if (const auto found = by_tensor_.find(parameter.tensor.unsafeGetTensorImpl());
          found != by_tensor_.end())
        parameter.name = all_[found->second].name;
  return groups;
}

namespace {

std::vector<mesh::HeldTensor> whole_tensors(const std::vector<NamedTensor>& tensors) {
  std::vector<mesh::HeldTensor> held;
  for (const auto& [name, tensor] : tensors) held.push_back(mesh::whole_tensor(name, tensor));
  return held;
}

// Copies, as those of tensors that are cut are.
std::vector<NamedTensor> handed_out(const std::vector<NamedTensor>& tensors,
                                    const StateDictOptions& options, bool is_first) {
  const c10::NoGradGuard no_grad;
  std::vector<NamedTensor> state;
  if (options.rank0_only && !is_first) return state;
  for (const auto& [name, tensor] : tensors) {
    const c10::Device device = options.offload_to_cpu ? c10::Device(at::kCPU) : tensor.device();
    state.push_back({name, tensor.detach().to(device, tensor.scalar_type(), /*non_blocking=*/false,
                                              /*copy=*/true)});
  }
  return state;
}

// Every rank has everything.
class Replicated : public ParallelModel {
 public:
  Replicated(torch::nn::Module& module, const std::shared_ptr<comm::Communicator>& group,
             const replicate::Options& options, const data_parallel::CountedPass& counted_pass,
             optim::NormScope scope, std::function<void()> take_back = {})
      : names_(module),
        group_(group),
        scope_(std::move(scope)),
        parallel_(module, group, options, counted_pass, std::move(take_back)) {}

  void check_model() override { parallel_.reducer().check_model(); }
  void check_consistency_every(std::int64_t exchanges) override {
    parallel_.reducer().check_consistency_every(exchanges);
  }
  void check_step() override {
    check_model();
    parallel_.reducer().check_exchanged();
  }
  void backward(const at::Tensor& loss_sum, std::int64_t count) override {
    parallel_.backward(loss_sum, count);
  }
  void backward_passes(const std::function<at::Tensor()>& passes, std::int64_t count) override {
    parallel_.backward_passes(passes, count);
  }
  data_parallel::NoSync no_sync() override { return parallel_.no_sync(); }
  const data_parallel::StepTotals& totals() const override { return parallel_.totals(); }

  optim::ClipResult clip_gradients(double max_norm) override {
    parallel_.reducer().check_exchanged();
    return optim::clip_gradients(names_.trained(), max_norm, scope_, device());
  }
  at::Tensor gradient_norm() override {
    parallel_.reducer().check_exchanged();
    return optim::gradient_norm(names_.trained(), scope_, device());
  }
  at::Tensor unscale_gradients(optim::GradScaler& scaler) override {
    parallel_.reducer().check_exchanged();
    at::Tensor overflow = scaler.unscale(names_.trained());
    group_->all_reduce(overflow, comm::ReduceOp::max).wait();
    return overflow;
  }
  // A copy, as that of a gradient that is cut is.
  at::Tensor full_gradient(const std::string& name) override {
    parallel_.reducer().check_exchanged();
    const at::Tensor& gradient = names_.parameter(name).grad();
    return gradient.defined() ? gradient.detach().clone() : gradient;
  }

  std::vector<NamedTensor> full_state_dict(const StateDictOptions& options) override {
    return names_.with_every_name(handed_out(names_.distinct(), options, group_->rank() == 0));
  }
  void load_full_state_dict(const std::vector<NamedTensor>& state) override {
    const c10::NoGradGuard no_grad;
    const std::vector<NamedTensor> wanted = names_.distinct();
    const std::vector<NamedTensor> given = names_.with_first_names(state);
    check_state("state", wanted, given);
    if (group_->rank() == 0)
      for (const auto& [name, tensor] : data_parallel::by_name(given))
        names_.tensor(name).copy_(tensor);
    data_parallel::broadcast_from_first(wanted, *group_);
    parallel_.reducer().parameters_written();
  }
  std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                const StateDictOptions& options) override {
    return handed_out(optimizer.state(), options, group_->rank() == 0);
  }
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state) override {
    std::vector<NamedTensor> received = optimizer.state();
    check_state("optimizer's state", received, state);
    // In this optimizer's order on every rank: the list may have another.
    if (group_->rank() == 0) {
      const auto given = data_parallel::by_name(state);
      for (auto& [name, tensor] : received) tensor = given.at(name).to(tensor.scalar_type());
    }
    data_parallel::broadcast_from_first(received, *group_, device());
    optimizer.load_state(received);
  }

  std::vector<mesh::HeldTensor> held_state() override { return whole_tensors(names_.distinct()); }
  void held_state_written() override { parallel_.reducer().parameters_written(); }
  std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) override {
    return whole_tensors(optimizer.state());
  }

  std::shared_ptr<void> full_parameters() override { return nullptr; }
  bool every_rank_computes() const override { return false; }
  std::string describe() const override {
    return fmt::format("{} parameters, whole on each of {} ranks", num_parameters(),
                       group_->size());
  }
  MemoryReport memory_report() const override {
    MemoryReport report{.num_parameters = num_parameters(), .optimizer = *optimizer_bytes_};
    for (const NamedTensor& one : names_.distinct_parameters()) {
      report.parameters += static_cast<std::int64_t>(one.tensor.nbytes());
      if (one.tensor.grad().defined())
        report.gradients += static_cast<std::int64_t>(one.tensor.grad().nbytes());
    }
    for (const NamedTensor& one : names_.distinct_buffers())
      report.buffers += static_cast<std::int64_t>(one.tensor.nbytes());
    return report;
  }
  const TensorNames& names() const override { return names_; }

 private:
  std::int64_t num_parameters() const {
    std::int64_t total = 0;
    for (const NamedTensor& one : names_.distinct_parameters()) total += one.tensor.numel();
    return total;
  }
  c10::Device device() const { return names_.all().front().tensor.device(); }

  // Every rank calls it, and looks at the first one's list.
  void check_state(const char* what, const std::vector<NamedTensor>& wanted,
                   const std::vector<NamedTensor>& given) const {
    std::string fault;
    if (group_->rank() == 0) fault = data_parallel::state_fault(wanted, given);
    data_parallel::refuse_together(
        fault.empty() ? ""
                      : fmt::format("the {} does not fit this model: {}. Pass what the "
                                    "same model's full_state_dict() or full_optimizer_state() "
                                    "returned",
                                    what, fault),
        *group_);
  }

  std::unique_ptr<optim::Optimizer> do_make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override {
    return optim::counted(optim::make_optimizer(options, names_.renamed(std::move(groups))),
                          optimizer_bytes_);
  }

  TensorNames names_;
  std::shared_ptr<comm::Communicator> group_;
  optim::NormScope scope_;
  std::shared_ptr<std::int64_t> optimizer_bytes_ = std::make_shared<std::int64_t>(0);
  replicate::DistributedDataParallel parallel_;
};

// Every rank has the model and its gradients, and the optimizer's state of a part.
class OptimizerSharded final : public ParallelModel {
 public:
  OptimizerSharded(torch::nn::Module& module, const std::shared_ptr<comm::Communicator>& group,
                   const DistributedConfig& config, const data_parallel::CountedPass& counted_pass,
                   const optim::NormScope& scope)
      : shards_(module, group, config.fsdp.units),
        replicas_(module, group, config.ddp, counted_pass, scope, [this] { shards_.take_back(); }) {
  }

  void check_model() override { replicas_.check_model(); }
  void check_consistency_every(std::int64_t exchanges) override {
    replicas_.check_consistency_every(exchanges);
  }
  void backward(const at::Tensor& loss_sum, std::int64_t count) override {
    replicas_.backward(loss_sum, count);
  }
  void backward_passes(const std::function<at::Tensor()>& passes, std::int64_t count) override {
    replicas_.backward_passes(passes, count);
  }
  data_parallel::NoSync no_sync() override { return replicas_.no_sync(); }
  const data_parallel::StepTotals& totals() const override { return replicas_.totals(); }
  optim::ClipResult clip_gradients(double max_norm) override {
    return replicas_.clip_gradients(max_norm);
  }
  at::Tensor gradient_norm() override { return replicas_.gradient_norm(); }
  at::Tensor unscale_gradients(optim::GradScaler& scaler) override {
    return replicas_.unscale_gradients(scaler);
  }
  at::Tensor full_gradient(const std::string& name) override {
    return replicas_.full_gradient(name);
  }
  std::vector<NamedTensor> full_state_dict(const StateDictOptions& options) override {
    return replicas_.full_state_dict(options);
  }
  void load_full_state_dict(const std::vector<NamedTensor>& state) override {
    replicas_.load_full_state_dict(state);
  }
  std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                const StateDictOptions& options) override {
    return shards_.full_optimizer_state(optimizer, options);
  }
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state) override {
    shards_.load_full_optimizer_state(optimizer, state);
  }
  std::vector<mesh::HeldTensor> held_state() override { return replicas_.held_state(); }
  void held_state_written() override { replicas_.held_state_written(); }
  std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) override {
    return shard::held_state(optimizer.state(), shards_.units());
  }
  std::shared_ptr<void> full_parameters() override { return nullptr; }
  bool every_rank_computes() const override { return false; }
  std::string describe() const override { return shards_.describe(); }
  MemoryReport memory_report() const override {
    MemoryReport report = shards_.memory_report();
    report.buffers = replicas_.memory_report().buffers;
    return report;
  }
  const TensorNames& names() const override { return replicas_.names(); }

 private:
  std::unique_ptr<optim::Optimizer> do_make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override {
    return shards_.make_optimizer(options, names().renamed(std::move(groups)));
  }
  void check_step() override { replicas_.check_step(); }

  shard::OptimizerShards shards_;  // first: moves the parameters that the other hooks into
  Replicated replicas_;
};

class Sharded final : public ParallelModel {
 public:
  Sharded(torch::nn::Module& module, shard::Groups groups, const shard::Options& options,
          const data_parallel::CountedPass& counted_pass, optim::NormScope scope,
          const shard::Origin& origin)
      : names_(module),
        scope_(std::move(scope)),
        sharded_(module, std::move(groups), options, counted_pass, origin) {}

  void check_model() override { sharded_.gradients().check_model(); }
  void check_consistency_every(std::int64_t exchanges) override {
    sharded_.gradients().check_consistency_every(exchanges);
  }
  void backward(const at::Tensor& loss_sum, std::int64_t count) override {
    sharded_.backward(loss_sum, count);
  }
  void backward_passes(const std::function<at::Tensor()>& passes, std::int64_t count) override {
    sharded_.backward_passes(passes, count);
  }
  data_parallel::NoSync no_sync() override { return sharded_.no_sync(); }
  const data_parallel::StepTotals& totals() const override { return sharded_.totals(); }
  optim::ClipResult clip_gradients(double max_norm) override {
    return sharded_.clip_gradients(max_norm, scope_);
  }
  at::Tensor gradient_norm() override { return sharded_.gradient_norm(scope_); }
  at::Tensor unscale_gradients(optim::GradScaler& scaler) override {
    return sharded_.unscale_gradients(scaler);
  }
  at::Tensor full_gradient(const std::string& name) override {
    return sharded_.full_gradient(names_.first_name(name));
  }
  std::vector<NamedTensor> full_state_dict(const StateDictOptions& options) override {
    return names_.with_every_name(sharded_.full_state_dict(options));
  }
  void load_full_state_dict(const std::vector<NamedTensor>& state) override {
    sharded_.load_full_state_dict(names_.with_first_names(state));
  }
  std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                const StateDictOptions& options) override {
    return sharded_.full_optimizer_state(optimizer, options);
  }
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state) override {
    sharded_.load_full_optimizer_state(optimizer, state);
  }
  std::vector<mesh::HeldTensor> held_state() override { return sharded_.held_state(); }
  void held_state_written() override { sharded_.held_state_written(); }
  std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) override {
    return shard::held_state(optimizer.state(), sharded_.units());
  }
  std::shared_ptr<void> full_parameters() override {
    // What was written to them meanwhile lasts, through whatever it was written.
    using Hold = shard::ParameterGatherer::Hold;
    return std::shared_ptr<Hold>(sharded_.full_parameters().release(), [](Hold* hold) {
      const std::unique_ptr<Hold> owned(hold);
      hold->keep_edits();
    });
  }
  bool every_rank_computes() const override { return sharded_.every_rank_computes(); }
  std::string describe() const override { return sharded_.describe(); }
  MemoryReport memory_report() const override { return sharded_.memory_report(); }
  const TensorNames& names() const override { return names_; }

 private:
  std::unique_ptr<optim::Optimizer> do_make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override {
    return sharded_.make_optimizer(options, names_.renamed(std::move(groups)));
  }
  void check_step() override {}  // its optimizers do it themselves

  TensorNames names_;
  optim::NormScope scope_;
  shard::FullyShardedDataParallel sharded_;
};

std::unique_ptr<ParallelModel> make_strategy(torch::nn::Module& module, mesh::DeviceMesh& mesh,
                                             const JobAxes& axes, const DistributedConfig& config,
                                             const data_parallel::CountedPass& counted_pass,
                                             const optim::NormScope& scope,
                                             const shard::Origin& origin) {
  const ShardingStrategy strategy = strategy_of(config);
  const auto all = group_along(mesh, axes.gradients);
  shard::Options options = config.fsdp;
  options.cut = strategy == ShardingStrategy::SHARD_GRAD_OP ? shard::Cut::gradients
                                                            : shard::Cut::gradients_and_parameters;
  switch (strategy) {
    case ShardingStrategy::NO_SHARD:
      return std::make_unique<Replicated>(module, all, config.ddp, counted_pass, scope);
    case ShardingStrategy::SHARD_OPTIMIZER:
      return std::make_unique<OptimizerSharded>(module, all, config, counted_pass, scope);
    case ShardingStrategy::SHARD_GRAD_OP:
    case ShardingStrategy::FULL_SHARD:
      return std::make_unique<Sharded>(module, shard::shard_over(all), options, counted_pass, scope,
                                       origin);
    case ShardingStrategy::HYBRID_SHARD:
      return std::make_unique<Sharded>(
          module, shard::shard_over(all, group_along(mesh, axes.shards), mesh.axis("dp_replicate")),
          options, counted_pass, scope, origin);
  }
  LOCKSTEP_CHECK(false, "a strategy without a name");
}

}  // namespace

std::unique_ptr<optim::Optimizer> ParallelModel::make_optimizer(
    const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) {
  if (layers_are_cut_ && options.kind() != optim::StepKind::elementwise)
    throw UsageError("{} looks at whole parameters, and the layers of this model are cut over a "
                     "tensor axis: use an optimizer that goes by elements, such as AdamW, or a "
                     "tensor axis of 1",
                     optim::name_of(options));
  return optim::checked(
      do_make_optimizer(options, std::move(groups)),
      {.before_use =
           [weak = std::weak_ptr<void>(alive_)] {
             if (weak.expired())
               throw UsageError(
                   "the model of this optimizer is gone, or the manager that spread it over the "
                   "ranks: keep both, the latter as setup_distributed() returned it, for as long "
                   "as the optimizer is used");
           },
       .before_step = [this] { check_step(); }});
}

std::unique_ptr<ParallelModel> make_parallel(torch::nn::Module& module, mesh::DeviceMesh& mesh,
                                             const JobAxes& axes, const DistributedConfig& config,
                                             const data_parallel::CountedPass& counted_pass,
                                             const optim::NormScope& scope,
                                             const shard::Origin& origin) {
  auto made = make_strategy(module, mesh, axes, config, counted_pass, scope, origin);
  made->check_consistency_every(config.consistency_check_interval);
  made->layers_are_cut_ = scope.cuts_parameters;
  return made;
}

}  // namespace lockstep
