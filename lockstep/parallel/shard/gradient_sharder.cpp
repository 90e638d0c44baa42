#include <lockstep/parallel/shard/gradient_sharder.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/shard/unit_sizes.h>

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

std::shared_ptr<GradientSharder> GradientSharder::make(Model model, Groups groups,
                                                       data_parallel::CountedPass counted_pass) {
  std::shared_ptr<GradientSharder> sharder(
      new GradientSharder(std::move(model), std::move(groups), std::move(counted_pass)));
  sharder->install_hooks();
  return sharder;
}

GradientSharder::GradientSharder(Model model, Groups groups,
                                 data_parallel::CountedPass counted_pass)
    : model_(std::move(model)),
      groups_(std::move(groups)),
      counted_pass_(std::move(counted_pass)),
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
}

void GradientSharder::install_hooks() {
  for (std::size_t index = 0; index < slots_.size(); ++index)
    slots_[index].hook = std::make_unique<data_parallel::GradientHook>(
        slots_[index].parameter, [weak = weak_from_this(), index](const at::Tensor& arrived) {
          if (const auto sharder = weak.lock()) sharder->on_gradient(index, arrived);
        });
}

void GradientSharder::set_exchange(bool on) {
  const std::lock_guard lock(mutex_);
  exchange_ = on;
}

void GradientSharder::backward(const at::Tensor& loss_sum, std::int64_t count) {
  {
    const std::lock_guard lock(mutex_);
    check_usable();
    check_model();
    if (!loss_.any()) {
      check_zeroed();
      has_plain_gradients_ = false;
    }
    loss_.add(loss_sum, count, device());
    // Until this pass has ended well: what was counted and sent cannot be taken back.
    broken_ = true;
    if (exchange_) begin();
  }
  if (loss_sum.defined() && loss_sum.requires_grad()) {
    const data_parallel::CountedPassGuard pass(counted_pass_, this);
    loss_sum.backward();
  }
  const std::lock_guard lock(mutex_);
  if (exchange_) finish();
  broken_ = false;
}

void GradientSharder::check_usable() const {
  if (broken_)
    throw UsageError("a backward pass before this one ended in an exception, so that this rank's "
                     "samples are counted and its gradients are not: start the ranks anew from a "
                     "checkpoint");
}

void GradientSharder::check_model() const {
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

// Before the first counted pass of a step: what is left of the step before would be added to, and
// gradients of mean losses to those of summed ones.
void GradientSharder::check_zeroed() const {
  for (std::size_t index = 0; index < slots_.size(); ++index)
    if (absent_->is_in(index, slots_[index].parameter) && !absent_->was_zeroed(index))
      throw UsageError("the gradient of '{}' is still that of {}: call zero_grad() between steps",
                       slots_[index].name,
                       has_plain_gradients_ ? "a loss.backward() before this backward(model, "
                                              "loss_sum, count), and they do not add up"
                                            : "the step before");
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

void GradientSharder::check_gradient(const Slot& slot, const at::Tensor& gradient) const {
  if (gradient.layout() != at::kStrided)
    throw UsageError("the gradient of '{}' is sparse, which cannot be summed over ranks: make it "
                     "dense (for an Embedding, sparse(false))",
                     slot.name);
  if (const void* const other = counted_pass_->load(); other != nullptr && other != this)
    throw UsageError("the gradient of '{}' came in a backward(model, loss_sum, count) of another "
                     "model, whose samples it would not be divided by: register both in one module "
                     "and wrap that",
                     slot.name);
  if (!is_counted_pass() && loss_.any())
    throw UsageError("the gradient of '{}' came in a loss.backward() after a backward(model, "
                     "loss_sum, count) of the same step, and they do not add up: use one of them",
                     slot.name);
  if (gradient.requires_grad())
    throw UsageError("the gradient of '{}' is itself part of a graph (create_graph), which a "
                     "sharded model cannot follow through its sums: use torch::autograd::grad() "
                     "for it",
                     slot.name);
}

void GradientSharder::on_gradient(std::size_t index, const at::Tensor& arrived) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  at::Tensor& gradient = slot.parameter.mutable_grad();
  // Where the sums of an exchange are added to, autograd has put nothing in place.
  const bool absent = absent_->is_in(index, slot.parameter);
  check_gradient(slot, absent ? arrived : gradient);
  slot.used = true;
  if (absent) slot.adds = true;
  if (!is_counted_pass() && !has_plain_gradients_) {
    check_not_counted();
    has_plain_gradients_ = true;
  }
  if (!exchange_) {
    // Added up in the optimizer's type; autograd adds to what is there.
    const at::ScalarType summed = model_.units[slot.unit]->format().own;
    if (absent)
      gradient = arrived.to(summed, /*non_blocking=*/false, /*copy=*/true);
    else if (gradient.scalar_type() != summed)
      gradient = gradient.to(summed);
    else if (!data_parallel::is_sole_user(gradient, arrived))
      gradient = gradient.clone();
    return;
  }
  if (!in_backward_) {
    if (!is_counted_pass()) check_model();
    in_backward_ = true;
    if (!is_counted_pass()) {
      begin();
      torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
        if (const auto sharder = weak.lock()) {
          const std::lock_guard finishing(sharder->mutex_);
          sharder->finish();
        }
      });
    }
  }
  if (slot.ready)
    throw UsageError("the gradient of '{}' came twice in one backward pass, or the pass before "
                     "ended in an exception: start the ranks anew from a checkpoint",
                     slot.name);
  collect(slot, absent ? arrived : gradient);
  gradient = at::Tensor();
  launch_ready();
}

at::Tensor GradientSharder::piece(std::size_t unit, std::size_t member) const {
  const std::size_t index = states_[unit].slots.at(member);
  const Slot& slot = slots_[index];
  if (!slot.parameter.grad().defined()) return {};
  if (!absent_->is_in(index, slot.parameter))
    throw UsageError("the gradient of '{}' is this rank's alone: the last backward pass before a "
                     "step must exchange gradients, so not be under no_sync()",
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

void GradientSharder::drop_gradients() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    slot.parameter.mutable_grad() = at::Tensor();
    // Of passes that were not exchanged, and never will be.
    slot.used = slot.adds = false;
  }
  loss_.clear();
}

std::int64_t GradientSharder::gradient_bytes() const {
  std::int64_t total = 0;
  for (const UnitState& state : states_)
    if (state.sums.defined()) total += static_cast<std::int64_t>(state.sums.nbytes());
  return total;
}

}  // namespace lockstep::shard
