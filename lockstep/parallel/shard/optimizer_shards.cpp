#include <lockstep/parallel/shard/optimizer_shards.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/optimizer_state.h>
#include <lockstep/parallel/shard/sharded_optimizer.h>
#include <lockstep/parallel/shard/wrapping_checks.h>

namespace lockstep::shard {

OptimizerShards::OptimizerShards(torch::nn::Module& module,
                                 const std::shared_ptr<comm::Communicator>& group,
                                 const UnitPolicy& units)
    : group_(group), module_name_(module.name()) {
  refuse_sharded(module);
  const auto parameters = data_parallel::distinct_tensors(data_parallel::held_parameters(module));
  if (!parameters.empty()) data_parallel::refuse_together(shared_memory_fault(parameters), *group);
  for (PlannedUnit& plan : plan_units(module, units)) {
    const at::Tensor& first = plan.parameters.front().tensor;
    units_.push_back(std::make_unique<FlatUnit>(
        std::move(plan), group, nullptr, UnitFormat::of(first.scalar_type(), first.device())));
    units_.back()->adopt(*group);
  }
}

std::unique_ptr<optim::Optimizer> OptimizerShards::make_optimizer(
    const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) {
  return make_sharded_optimizer(
      {.name = module_name_,
       .units = units_,
       .group = group_,
       .gradient = [this](std::size_t unit, std::size_t member) -> at::Tensor {
         const at::Tensor& gradient = units_[unit]->parameters()[member].tensor.grad();
         if (!gradient.defined()) return {};
         const mesh::Interval piece = units_[unit]->layout().piece(member, group_->rank());
         return gradient.reshape({-1}).narrow(0, piece.begin, piece.size());
       },
       .drop_gradients =
           [this](std::span<const SteppedModel::Member> members) {
             for (const auto& [unit, member] : members)
               units_[unit]->parameters()[member].tensor.mutable_grad() = at::Tensor();
           },
       .after_step = [this] { refresh(units_); }},
      options, std::move(groups));
}

std::vector<NamedTensor> OptimizerShards::full_optimizer_state(const optim::Optimizer& optimizer,
                                                               const StateDictOptions& options) {
  return gather_state(optimizer.state(), units_, *group_, options, group_->rank() == 0);
}

void OptimizerShards::load_full_optimizer_state(optim::Optimizer& optimizer,
                                                const std::vector<NamedTensor>& state) {
  scatter_state(optimizer, state, units_, *group_, group_->rank());
}

std::vector<mesh::HeldTensor> OptimizerShards::held_optimizer_state(
    const optim::Optimizer& optimizer) {
  return held_state(optimizer.state(), units_);
}

void OptimizerShards::take_back() {
  std::size_t num_taken = 0;
  for (const auto& unit : units_) num_taken += unit->take_back();
  if (num_taken > 0)
    log::info("{} parameters were given other memory after the model was wrapped, as torch::load() "
              "does: their values were taken into the memory that the optimizer steps on",
              num_taken);
}

MemoryReport OptimizerShards::memory_report() const {
  MemoryReport report{.num_parameters = count_parameters(units_), .num_ranks = group_->size()};
  for (const auto& unit : units_) {
    report.parameters += unit->gathered_bytes();
    for (const NamedTensor& parameter : unit->parameters())
      if (parameter.tensor.grad().defined())
        report.gradients += static_cast<std::int64_t>(parameter.tensor.grad().nbytes());
  }
  return report;
}

std::string OptimizerShards::describe() const { return describe_units(units_); }

}  // namespace lockstep::shard
