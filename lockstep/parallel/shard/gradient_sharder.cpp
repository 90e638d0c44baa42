#include <lockstep/parallel/shard/gradient_sharder.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::shard {

namespace {

std::vector<NamedTensor> trained_parameters(std::span<const std::unique_ptr<FlatUnit>> units) {
  std::vector<NamedTensor> all;
  for (const auto& unit : units)
    if (unit->is_trained())
      all.insert(all.end(), unit->parameters().begin(), unit->parameters().end());
  return all;
}

std::int64_t largest_bytes(std::span<const std::unique_ptr<FlatUnit>> units) {
  std::int64_t largest = 0;
  for (const auto& unit : units)
    largest =
        std::max(largest, unit->layout().num_padded() *
                              static_cast<std::int64_t>(c10::elementSize(unit->format().reduced)));
  return largest;
}

}  // namespace

std::shared_ptr<GradientSharder> GradientSharder::make(
    const data_parallel::RegisteredParameters& module, Model model, Groups groups,
    data_parallel::CountedPass counted_pass) {
  std::shared_ptr<GradientSharder> sharder(
      new GradientSharder(module, std::move(model), std::move(groups), std::move(counted_pass)));
  std::vector<NamedTensor> trained;
  for (std::size_t index = 0; index < sharder->slots_.size(); ++index) {
    Slot& slot = sharder->slots_[index];
    slot.hook = sharder->hear_of(slot.parameter, index);
    trained.push_back({slot.name, slot.parameter});
  }
  sharder->listen(std::move(trained));
  return sharder;
}

GradientSharder::~GradientSharder() {
  for (const Slot& slot : slots_) leave(slot.parameter);
}

GradientSharder::GradientSharder(const data_parallel::RegisteredParameters& module, Model model,
                                 Groups groups, data_parallel::CountedPass counted_pass)
    : GradientExchange(module, groups.all, model.units.front()->device(), std::move(counted_pass)),
      model_(std::move(model)),
      groups_(std::move(groups)),
      buffers_of_gradients_(
          [group = groups_.reduce, device = model_.units.front()->device()](std::int64_t bytes) {
            return device.is_cpu() ? group->allocate({bytes}, at::kByte)
                                   : at::empty({bytes}, at::dtype(at::kByte).device(device));
          },
          kGradientBuffers * largest_bytes(model_.units)),
      absent_(AbsentGradients::make(trained_parameters(model_.units))),
      states_(model_.units.size()),
      num_ranks_(at::full({1}, static_cast<double>(groups_.all->size()), at::kDouble)) {
  for (std::size_t unit = 0; unit < model_.units.size(); ++unit) {
    if (!model_.units[unit]->is_trained()) continue;
    const auto& parameters = model_.units[unit]->parameters();
    for (std::size_t member = 0; member < parameters.size(); ++member) {
      states_[unit].slots.push_back(slots_.size());
      slots_.push_back({.unit = unit,
                        .member = member,
                        .name = parameters[member].name,
                        .parameter = parameters[member].tensor});
    }
    states_[unit].pending = parameters.size();
    const UnitFormat& format = model_.units[unit]->format();
    if (format.stepped_on != format.device) sums_on_host_ = true;
    // Backward meets the last layers first.
    order_.insert(order_.begin(), unit);
  }
  // Whole gradients between passes would be what the strategy is there to spare.
  exchanges_each_pass_ = cuts_sums_ = true;
}

void GradientSharder::check_parameters() {
  for (const auto& unit : model_.units)
    for (const auto& [name, parameter] : unit->parameters()) {
      if (!parameter.storage().is_alias_of(unit->flat().storage()))
        throw UsageError("'{}' was given other memory after the model was sharded, as to(device), "
                         "to(dtype) and set_data() do, so that it would be trained on each rank by "
                         "itself: convert the model before wrap_model()",
                         name);
      if (!unit->is_trained() && parameter.requires_grad())
        throw UsageError("'{}' was frozen when the model was sharded and is not any more, so that "
                         "its gradients would stay on each rank: set requires_grad before, and "
                         "freeze it afterwards",
                         name);
    }
  for (const Slot& slot : slots_)
    if (slot.parameter.requires_grad() && !slot.hook->hears())
      throw UsageError("'{}' was moved to another device or dtype after the model was sharded, so "
                       "that its gradients would stay on each rank: move the model first",
                       slot.name);
}

// New gradients would be added to those of the step before, and gradients of mean losses to those
// of summed ones.
void GradientSharder::check_zeroed() const {
  for (std::size_t index = 0; index < slots_.size(); ++index)
    if (absent_->is_in(index, slots_[index].parameter) && !absent_->was_zeroed(index))
      refuse_unzeroed(slots_[index].name);
}

// Before the first plain pass after counted ones.
void GradientSharder::check_not_counted() const {
  for (std::size_t index = 0; index < slots_.size(); ++index)
    if (absent_->is_in(index, slots_[index].parameter) && !absent_->was_zeroed(index))
      throw UsageError("the gradient of '{}' is still that of a backward(model, loss_sum, count) "
                       "before this loss.backward(), and they do not add up: call zero_grad() "
                       "between steps",
                       slots_[index].name);
}

void GradientSharder::on_gradient(std::size_t index, const at::Tensor& arrived) {
  Slot& slot = slots_[index];
  at::Tensor& gradient = slot.parameter.mutable_grad();
  // Where the sums of an exchange are added to, autograd has put nothing in place.
  const bool absent = absent_->is_in(index, slot.parameter);
  check_gradient(slot.name, absent ? arrived : gradient);
  if ((absent ? arrived : gradient).requires_grad())
    throw UsageError("the gradient of '{}' is itself part of a graph (create_graph), which a "
                     "sharded model cannot follow through its sums: use torch::autograd::grad() "
                     "for it",
                     slot.name);
  slot.used = true;
  if (absent) slot.adds = true;
  if (!is_counted_pass() && !has_plain_gradients_) {
    check_not_counted();
    has_plain_gradients_ = true;
  }
  if (!exchange()) {
    wait_for_exchange(index);
    // Added up in the widest type that there is; autograd adds to what is there.
    const UnitFormat& format = model_.units[slot.unit]->format();
    const at::ScalarType summed = at::promote_types(format.own, format.gathered);
    if (absent)
      gradient = arrived.to(summed, /*non_blocking=*/false, /*copy=*/true);
    else if (gradient.scalar_type() != summed)
      gradient = gradient.to(summed);
    else if (!intercept::is_sole_user(gradient, arrived))
      gradient = gradient.clone();
    return;
  }
  enter_pass();
  if (slot.ready) refuse_second(slot.name);
  collect(slot, absent ? arrived : gradient);
  gradient = at::Tensor();
  launch_ready();
}

at::Tensor GradientSharder::piece(std::size_t unit, std::size_t member) const {
  const std::size_t index = states_[unit].slots.at(member);
  const Slot& slot = slots_[index];
  if (!slot.parameter.grad().defined()) return {};
  if (has_partial_sums())
    throw UsageError(
        "the gradient of '{}' is a sum that is not divided yet, as further passes were "
        "to follow: the last backward pass before a step must not be under "
        "accumulate()",
        slot.name);
  if (!absent_->is_in(index, slot.parameter))
    throw UsageError("the gradient of '{}' is this rank's alone: the last backward pass before a "
                     "step must exchange gradients, so not be under no_sync() or accumulate()",
                     slot.name);
  const FlatLayout& layout = model_.units[unit]->layout();
  const int rank = groups_.reduce->rank();
  at::Tensor sum = states_[unit].sums.narrow(0, layout.piece_offset(member, rank),
                                             layout.piece(member, rank).size());
  if (absent_->was_zeroed(index)) {
    const c10::NoGradGuard no_grad;
    sum.zero_();
  }
  return sum;
}

void GradientSharder::drop_gradients(std::span<const SteppedModel::Member> members) {
  const std::lock_guard lock(mutex_);
  for (const auto& [unit, member] : members) {
    if (states_[unit].slots.empty()) continue;
    Slot& slot = slots_[states_[unit].slots[member]];
    slot.parameter.mutable_grad() = at::Tensor();
    // They came in passes that were not exchanged, and never will be.
    slot.used = slot.adds = false;
  }
  for (std::size_t index = 0; index < slots_.size(); ++index)
    if (slots_[index].used || absent_->is_in(index, slots_[index].parameter)) return;
  forget_passes();
}

std::int64_t GradientSharder::gradient_bytes() const {
  std::int64_t total = 0;
  for (const UnitState& state : states_)
    if (state.sums.defined()) total += static_cast<std::int64_t>(state.sums.nbytes());
  return total;
}

namespace {

bool in_backward() { return torch::autograd::get_current_graph_task_nodes_in_graph() != nullptr; }

// In place of an operator that works on its first argument, which is its result.
void return_first(intercept::Call& call) {
  const std::size_t count = call.arguments().size();
  c10::IValue first = call.arguments().front();
  torch::jit::drop(call.stack(), count);
  torch::jit::push(call.stack(), std::move(first));
}

}  // namespace

std::shared_ptr<AbsentGradients> AbsentGradients::make(const std::vector<NamedTensor>& parameters) {
  const c10::NoGradGuard no_grad;
  auto made = std::make_shared<AbsentGradients>();
  for (const auto& [name, parameter] : parameters) {
    Entry& entry = made->entries_.emplace_back();
    entry.name = name;
    entry.stand_in = tensor_without_memory(
        parameter.sizes(),
        at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device()));
    intercept::tag(entry.stand_in);
    const c10::Storage& memory = entry.stand_in.storage();
    made->by_memory_[memory.unsafeGetStorageImpl()] = made->entries_.size() - 1;
    intercept::add_owner(memory, made,
                         fmt::format("the gradient of '{}' was cut among the ranks by a manager "
                                     "that is gone",
                                     name));
  }
  return made;
}

void AbsentGradients::put(std::size_t index, const at::Tensor& parameter) const {
  parameter.mutable_grad() = entries_[index].stand_in;
}

bool AbsentGradients::is_in(std::size_t index, const at::Tensor& parameter) const {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && gradient.has_storage() &&
         gradient.storage().is_alias_of(entries_[index].stand_in.storage());
}

void AbsentGradients::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  const std::string& op = call.op().operator_name().name;
  Entry& entry = entries_[by_memory_.at(uses.front().tensor.storage().unsafeGetStorageImpl())];
  if (op == "aten::detach" || op == "aten::alias" || op == "aten::view_as") {
    call.proceed();
  } else if (op == "aten::detach_" || op == "aten::requires_grad_") {
    return_first(call);
  } else if (op == "aten::zero_") {
    entry.zeroed = true;
    return_first(call);
  } else if (op == "aten::add_" && in_backward() && uses.size() == 1 && uses.front().written) {
    // Autograd adds what has come: whoever hears of gradients gets it, too.
    return_first(call);
  } else {
    throw UsageError("{} was called on the gradient of '{}', which is cut among the ranks: step "
                     "with the optimizer of make_optimizer(), clip with clip_gradients(), and look "
                     "at it with full_gradient()",
                     op, entry.name);
  }
}

void AbsentGradients::on_save(const at::Tensor& tensor) const {
  throw UsageError("torch::save() was given the gradient of '{}', which is cut among the ranks: "
                   "write what full_gradient() returns",
                   entries_[by_memory_.at(tensor.storage().unsafeGetStorageImpl())].name);
}

}  // namespace lockstep::shard
