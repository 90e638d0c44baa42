#include <lockstep/parallel/replicate/distributed_data_parallel.h>

#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>

namespace lockstep::replicate {

namespace {

using data_parallel::MemoryReport;
using data_parallel::StateDictOptions;

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

// Every rank calls it, and looks at the first one's list.
void check_state(const char* what, const std::vector<NamedTensor>& wanted,
                 const std::vector<NamedTensor>& given, comm::Communicator& group) {
  std::string fault;
  if (group.rank() == 0) fault = data_parallel::state_fault(wanted, given);
  data_parallel::refuse_together(
      fault.empty() ? ""
                    : fmt::format("the {} does not fit this model: {}. Pass what the "
                                  "same model's full_state_dict() or full_optimizer_state() "
                                  "returned",
                                  what, fault),
      group);
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

// Every rank steps on all of it.
class WholeOptimizer final : public data_parallel::OptimizerPartition {
 public:
  WholeOptimizer(std::vector<NamedTensor> parameters, std::shared_ptr<comm::Communicator> group)
      : parameters_(std::move(parameters)), group_(std::move(group)) {}

  std::unique_ptr<optim::Optimizer> make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override {
    return optim::make_optimizer(options, std::move(groups));
  }
  std::vector<NamedTensor> full_optimizer_state(const optim::Optimizer& optimizer,
                                                const StateDictOptions& options) override {
    return handed_out(optimizer.state(), options, group_->rank() == 0);
  }
  void load_full_optimizer_state(optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state) override {
    std::vector<NamedTensor> received = optimizer.state();
    check_state("optimizer's state", received, state, *group_);
    // In this optimizer's order on every rank: the list may have another.
    if (group_->rank() == 0) {
      const auto given = data_parallel::by_name(state);
      for (auto& [name, tensor] : received) tensor = given.at(name).to(tensor.scalar_type());
    }
    data_parallel::broadcast_from_first(received, *group_, parameters_.front().tensor.device());
    optimizer.load_state(received);
  }
  std::vector<mesh::HeldTensor> held_optimizer_state(const optim::Optimizer& optimizer) override {
    return whole_tensors(optimizer.state());
  }

  void take_back() override {}  // it steps on parameters wherever they are

  std::string describe() const override {
    return fmt::format("{} parameters, whole on each of {} ranks", memory_report().num_parameters,
                       group_->size());
  }
  MemoryReport memory_report() const override {
    MemoryReport report;
    for (const auto& [name, parameter] : parameters_) {
      report.num_parameters += parameter.numel();
      report.parameters += bytes_of(parameter);
      report.gradients += bytes_of(parameter.grad());
    }
    return report;
  }

 private:
  std::vector<NamedTensor> parameters_;
  std::shared_ptr<comm::Communicator> group_;
};

}  // namespace

DistributedDataParallel::DistributedDataParallel(
    torch::nn::Module& module, std::shared_ptr<comm::Communicator> group, Options options,
    data_parallel::ModelContext context,
    std::unique_ptr<data_parallel::OptimizerPartition> partition)
    : ParallelModel(module, group, std::move(context)), partition_(std::move(partition)) {
  if (partition_ == nullptr)
    partition_ = std::make_shared<WholeOptimizer>(names().distinct_parameters(), group);
  GradientReducer::Tensors tensors{
      .trained = {},
      .frozen = {},
      .buffers = data_parallel::distinct_tensors(module.named_buffers()),
      .take_back = [partition = partition_] { partition->take_back(); }};
  std::vector<NamedTensor> all =
      data_parallel::distinct_tensors(data_parallel::held_parameters(module));
  for (const NamedTensor& parameter : all)
    (parameter.tensor.requires_grad() ? tensors.trained : tensors.frozen).push_back(parameter);
  all.insert(all.end(), tensors.buffers.begin(), tensors.buffers.end());
  data_parallel::check_same_tensors(all, *group);
  if (tensors.trained.empty())
    throw UsageError("the module '{}' has {} parameters and none of them requires a gradient: "
                     "there is nothing to train. Register them with register_parameter or "
                     "register_module",
                     module.name(), module.parameters().size());
  data_parallel::broadcast_from_first(all, *group);
  reducer_ =
      GradientReducer::make(data_parallel::RegisteredParameters(module), std::move(tensors),
                            std::move(group), std::move(options), this->context().counted_pass);
}

at::Tensor DistributedDataParallel::gradient_norm() {
  return optim::gradient_norm(stepped_on(), context().norm_scope, device());
}

std::vector<NamedTensor> DistributedDataParallel::full_optimizer_state(
    const optim::Optimizer& optimizer, const StateDictOptions& options) {
  return partition_->full_optimizer_state(optimizer, options);
}

void DistributedDataParallel::load_full_optimizer_state(optim::Optimizer& optimizer,
                                                        const std::vector<NamedTensor>& state) {
  partition_->load_full_optimizer_state(optimizer, state);
}

std::vector<mesh::HeldTensor> DistributedDataParallel::held_state() {
  return whole_tensors(names().distinct());
}

std::vector<mesh::HeldTensor> DistributedDataParallel::held_optimizer_state(
    const optim::Optimizer& optimizer) {
  return partition_->held_optimizer_state(optimizer);
}

MemoryReport DistributedDataParallel::memory_report() const {
  MemoryReport report = partition_->memory_report();
  report.optimizer = optimizer_bytes();
  for (const auto& [name, buffer] : names().distinct_buffers()) report.buffers += bytes_of(buffer);
  return report;
}

std::unique_ptr<optim::Optimizer> DistributedDataParallel::do_make_optimizer(
    const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) {
  return partition_->make_optimizer(options, std::move(groups));
}

void DistributedDataParallel::check_step() {
  check_model();
  reducer_->check_exchanged();
  partition_->take_back();
}

std::vector<optim::NamedParameter> DistributedDataParallel::stepped_on() {
  reducer_->check_exchanged();
  return names().trained();
}

// A copy, as that of a gradient that is cut is.
at::Tensor DistributedDataParallel::do_full_gradient(const std::string& name) {
  reducer_->check_exchanged();
  const at::Tensor& gradient = names().parameter(name).grad();
  return gradient.defined() ? gradient.detach().clone() : gradient;
}

std::vector<NamedTensor> DistributedDataParallel::do_full_state_dict(
    const StateDictOptions& options) {
  return handed_out(names().distinct(), options, group().rank() == 0);
}

void DistributedDataParallel::do_load_full_state_dict(const std::vector<NamedTensor>& state) {
  const c10::NoGradGuard no_grad;
  const std::vector<NamedTensor> wanted = names().distinct();
  check_state("state", wanted, state, group());
  if (group().rank() == 0)
    for (const auto& [name, tensor] : data_parallel::by_name(state))
      names().tensor(name).copy_(tensor);
  data_parallel::broadcast_from_first(wanted, group());
  reducer_->parameters_written();
}

}  // namespace lockstep::replicate
