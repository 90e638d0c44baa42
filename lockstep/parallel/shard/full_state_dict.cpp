// A sharded model's state, whole and in parts, out and in.
#include <map>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>

namespace lockstep::shard {

std::vector<NamedTensor> FullyShardedDataParallel::do_full_state_dict(
    const StateDictOptions& options) {
  const c10::NoGradGuard no_grad;
  sharder_->check_model();
  const bool wanted = !options.rank0_only || groups_.all->rank() == 0;
  std::vector<NamedTensor> state;
  const auto keep = [&](const NamedTensor& item, const at::Tensor& values) {
    if (!wanted) return;
    const c10::Device device = options.offload_to_cpu ? c10::Device(at::kCPU) : values.device();
    state.push_back({item.name, values.detach().to(device, values.scalar_type(),
                                                   /*non_blocking=*/false, /*copy=*/true)});
  };
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const at::Tensor whole = units_[unit]->whole();
    const FlatLayout& layout = units_[unit]->layout();
    const auto& parameters = units_[unit]->parameters();
    for (std::size_t member = 0; member < parameters.size(); ++member)
      keep(parameters[member],
           whole.narrow(0, layout.range(member).begin, layout.range(member).size())
               .view(parameters[member].tensor.sizes()));
  }
  for (const NamedTensor& buffer : buffers_) keep(buffer, buffer.tensor);
  return state;
}

void FullyShardedDataParallel::do_load_full_state_dict(const std::vector<NamedTensor>& state) {
  const c10::NoGradGuard no_grad;
  sharder_->check_model();
  const bool first = groups_.all->rank() == 0;
  std::vector<NamedTensor> wanted;
  for (const auto& unit : units_)
    wanted.insert(wanted.end(), unit->parameters().begin(), unit->parameters().end());
  wanted.insert(wanted.end(), buffers_.begin(), buffers_.end());
  const std::string fault = first ? data_parallel::state_fault(wanted, state) : "";
  data_parallel::refuse_together(
      fault.empty() ? ""
                    : fmt::format("the state is not that of '{}': {}. Pass what the same "
                                  "model's full_state_dict() returned",
                                  module_name_, fault),
      *groups_.all);
  std::map<std::string, at::Tensor> given;
  if (first) given = data_parallel::by_name(state);

  for (const auto& unit : units_) {
    // Through memory of its own: what is gathered now may be in use.
    const at::Tensor whole =
        at::empty({unit->layout().num_padded()}, unit->options(unit->format().own));
    if (first)
      for (std::size_t member = 0; member < unit->parameters().size(); ++member) {
        const mesh::Interval range = unit->layout().range(member);
        whole.narrow(0, range.begin, range.size())
            .copy_(given.at(unit->parameters()[member].name).reshape({-1}));
      }
    groups_.all->broadcast(whole, 0).wait();
    unit->replace(whole);
  }
  for (const NamedTensor& buffer : buffers_)
    if (first) buffer.tensor.copy_(given.at(buffer.name));
  if (!buffers_.empty()) data_parallel::broadcast_from_first(buffers_, *groups_.all);
  gatherer_->release_all();
}

std::vector<mesh::HeldTensor> FullyShardedDataParallel::held_state() {
  sharder_->check_model();
  std::vector<mesh::HeldTensor> held;
  for (const auto& unit : units_)
    for (std::size_t member = 0; member < unit->parameters().size(); ++member) {
      const auto& [name, parameter] = unit->parameters()[member];
      held.push_back({name, unit->piece(member), parameter.sizes().vec(), unit->placement(member)});
    }
  for (const auto& [name, buffer] : buffers_) held.push_back(mesh::whole_tensor(name, buffer));
  return held;
}

void FullyShardedDataParallel::held_state_written() {
  gatherer_->release_all();
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    units_[unit]->part_changed();
    if (units_[unit]->residence() != Residence::gathered) continue;
    units_[unit]->start_gather({.subject = static_cast<std::int32_t>(unit)});
    units_[unit]->finish_gather();
  }
}

}  // namespace lockstep::shard
