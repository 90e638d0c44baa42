// The messages of a sharder's ranks in a step: the count, units' gradients, which parameters were
// used.
#include <algorithm>
#include <chrono>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/shard/gradient_sharder.h>
#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::shard {

namespace {

// Sums that are on their way are there in less; the first of them may take a connection.
constexpr milliseconds kPatience{2'000};
constexpr std::chrono::microseconds kPoll{20};

// Whether a unit's sums come from the ranks in the type and to the place they stay in.
bool arrives_as_kept(const UnitFormat& format) {
  return format.reduced == format.own && format.stepped_on == format.device;
}

at::Tensor new_sums(const FlatUnit& unit) {
  const UnitFormat& format = unit.format();
  return format.stepped_on == format.device
             ? at::empty({unit.layout().part_size()}, unit.options(format.own))
             : device::host_memory(unit.layout().part_size(), format.own, format.device);
}

}  // namespace

void GradientSharder::collect(Slot& slot, const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  const FlatUnit& unit = *model_.units[slot.unit];
  UnitState& state = states_[slot.unit];
  if (!state.collected.defined()) {
    while (in_flight_.size() >= kGradientsInFlight && oldest_has_come()) settle_oldest();
    state.collected =
        buffers_of_gradients_.take(unit.layout().num_padded(), unit.options(unit.format().reduced));
  }
  const mesh::Interval range = unit.layout().range(slot.member);
  const at::Tensor place = state.collected.narrow(0, range.begin, range.size());
  if (gradient.defined())
    place.view(slot.parameter.sizes()).copy_(gradient);
  else
    place.zero_();
  slot.ready = true;
  if (--state.pending > 0) return;
  ready_order_.push_back(slot.unit);
  model_.gatherer->done_with(slot.unit);
}

void GradientSharder::launch_ready() {
  while (next_ < order_.size() && states_[order_[next_]].pending == 0)
    naming_units(model_.units, [&] { launch(order_[next_++]); });
}

void GradientSharder::launch(std::size_t index) {
  const c10::NoGradGuard no_grad;
  const FlatUnit& unit = *model_.units[index];
  const FlatLayout& layout = unit.layout();
  UnitState& state = states_[index];
  state.collected.narrow(0, layout.num_elements(), layout.num_padded() - layout.num_elements())
      .zero_();
  if (!state.sums.defined()) state.sums = new_sums(unit);
  bool adds = false;
  for (const std::size_t slot : state.slots) adds = adds || slots_[slot].adds;
  if (adds || !arrives_as_kept(unit.format()))
    state.incoming = at::empty({layout.part_size()}, unit.options(unit.format().reduced));
  const at::Tensor& output = state.incoming.defined() ? state.incoming : state.sums;
  in_flight_.push_back(index);
  if (model_.quantize_gradients) return launch_quantized(index, output);
  comm::CallOptions options{.subject = static_cast<std::int32_t>(index)};
  const bool divides = groups_.replicas == nullptr && divides_in_flight(unit);
  if (divides && loss_.any()) options.divisor = loss_.divisor();
  state.reducing = groups_.reduce->reduce_scatter(
      output, state.collected, divides ? comm::ReduceOp::mean : comm::ReduceOp::sum, options);
}

void GradientSharder::launch_quantized(std::size_t index, const at::Tensor& output) {
  UnitState& state = states_[index];
  const comm::QuantizedReductionOptions options{
      .call = {.subject = static_cast<std::int32_t>(index)}, .memory = [this](std::int64_t bytes) {
        return buffers_of_gradients_.take(bytes, at::dtype(at::kByte).device(device()));
      }};
  if (model_.nodes.inside != nullptr)
    state.quantized.emplace(model_.nodes, output, state.collected, options);
  else
    state.quantized.emplace(*groups_.reduce, output, state.collected, options);
  // The call sends a copy.
  state.collected = at::Tensor();
}

// Whether sums come back divided: a pass over them less. On other devices the count is not known to
// the host, and a pass costs little. Sums over several passes are divided once all are there.
bool GradientSharder::divides_in_flight(const FlatUnit& unit) const {
  if (is_partial() || has_partial_sums()) return false;
  return unit.device().is_cpu() && !model_.quantize_gradients &&
         (!loss_.any() || loss_.divides_in_flight());
}

// Bounds what is on its way. A rank that has no gradient for some parameter of a unit sends that
// one at the end of its pass, and gets there with the help of others: whoever waits for it here
// waits for itself. So nobody waits for long, and nobody does again.
bool GradientSharder::oldest_has_come() {
  const Deadline end = Deadline::after(kPatience);
  while (!naming_units(model_.units, [&] { return advance(in_flight_.front()); })) {
    if (!patient_) return false;
    if (end.passed()) {
      patient_ = false;
      log::warn(
          "gradients of the unit '{}' were not summed {} s after this rank had them: other "
          "ranks are slow, or have no gradient for some of its parameters. From now on this "
          "rank does not wait for them within a pass, and may hold the gradients of all units "
          "at once",
          model_.units[in_flight_.front()]->name(), kPatience.count() / 1000);
    } else {
      std::this_thread::sleep_for(kPoll);
    }
  }
  return true;
}

// Does what can be done without waiting, in the order of units; true where nothing is left.
bool GradientSharder::advance(std::size_t index) {
  UnitState& state = states_[index];
  if (state.quantized) {
    if (!state.quantized->ready()) return false;
    state.quantized->start_second_hop();
    if (!state.quantized->ready()) return false;
  } else if (!state.reducing.ready()) {
    return false;
  }
  if (groups_.replicas == nullptr) return true;
  add_replicas(index);
  return state.over_replicas->ready();
}

// Over the copies of the model, once the sums of this one are there.
void GradientSharder::add_replicas(std::size_t index) {
  UnitState& state = states_[index];
  if (state.over_replicas) return;
  if (state.quantized) state.quantized->wait();
  state.reducing.wait();
  const bool divides = divides_in_flight(*model_.units[index]);
  // The count is another group's, whose calls this one does not wait for.
  if (divides && loss_.any()) loss_.finish();
  comm::CallOptions options{.subject = static_cast<std::int32_t>(index)};
  if (divides) options.divisor = loss_.any() ? loss_.divisor() : num_ranks_;
  const at::Tensor& sums = state.incoming.defined() ? state.incoming : state.sums;
  state.over_replicas = groups_.replicas->all_reduce(
      sums, divides ? comm::ReduceOp::mean : comm::ReduceOp::sum, options);
}

void GradientSharder::settle_oldest() {
  naming_units(model_.units, [&] { settle(in_flight_.front()); });
  in_flight_.pop_front();
}

// Waits for a unit's sums, and puts them where they stay.
void GradientSharder::settle(std::size_t index) {
  const c10::NoGradGuard no_grad;
  const FlatUnit& unit = *model_.units[index];
  UnitState& state = states_[index];
  if (state.quantized) state.quantized->wait();
  state.reducing.wait();
  if (groups_.replicas != nullptr) {
    add_replicas(index);
    state.over_replicas->wait();
  }
  state.quantized.reset();
  state.reducing = comm::Work();
  state.over_replicas.reset();
  state.collected = at::Tensor();
  at::Tensor& arrived = state.incoming.defined() ? state.incoming : state.sums;
  const bool divides_here = !divides_in_flight(unit) && !is_partial() && !has_partial_sums();
  if (divides_here && loss_.any()) {
    loss_.finish();
    loss_.divide(arrived);
  } else if (divides_here) {
    arrived.div_(groups_.all->size());
  }
  if (!state.incoming.defined()) return;
  keep_incoming(state, unit);
  state.incoming = at::Tensor();
}

// Some members' sums may be added to what was there before, and others' not.
void GradientSharder::keep_incoming(UnitState& state, const FlatUnit& unit) {
  if (std::ranges::none_of(state.slots, [&](std::size_t slot) { return slots_[slot].adds; })) {
    state.sums.copy_(state.incoming, /*non_blocking=*/true);
    return;
  }
  const int rank = groups_.reduce->rank();
  for (const std::size_t slot : state.slots) {
    const std::size_t member = slots_[slot].member;
    const std::int64_t offset = unit.layout().piece_offset(member, rank);
    const std::int64_t size = unit.layout().piece(member, rank).size();
    const at::Tensor sum = state.sums.narrow(0, offset, size);
    const at::Tensor part = state.incoming.narrow(0, offset, size);
    if (slots_[slot].adds && !absent_->was_zeroed(slot))
      sum.add_(part.to(sum.device()));
    else
      sum.copy_(part);
  }
}

// The sums of all passes of the step, after the last of them.
void GradientSharder::divide_sums() {
  for (const std::size_t unit : order_) loss_.divide(states_[unit].sums);
}

// Ends a backward pass, on every rank in the same order: the units that were not complete, who used
// what, the buffers.
void GradientSharder::finish() {
  const c10::NoGradGuard no_grad;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    if (slot.ready) continue;
    at::Tensor& gradient = slot.parameter.mutable_grad();
    // A gradient of a pass under no_sync(), or of an exchange before, stays as it is.
    if (absent_->is_in(index, slot.parameter)) {
      slot.adds = true;
      gradient = at::Tensor();
    }
    collect(slot, gradient);
    gradient = at::Tensor();
    launch_ready();
  }

  std::vector<std::int64_t> used;
  for (const Slot& slot : slots_) used.push_back(slot.used ? 1 : 0);
  const bool alone = groups_.all->size() == 1;
  at::Tensor used_by = device::on_device(used, at::kInt, alone ? c10::Device(at::kCPU) : device());
  if (!alone) groups_.all->all_reduce(used_by).wait();

  while (!in_flight_.empty()) settle_oldest();
  // Sums in the host's memory are read there from now on.
  if (sums_on_host_) device::wait_for(device());
  const bool ends_step = !is_partial();
  if (loss_.any() && ends_step) {
    loss_.finish();
    if (has_partial_sums()) divide_sums();
  }
  hand_out(used_by);
  if (!model_.buffers.empty() && ends_step)
    data_parallel::broadcast_from_first(model_.buffers, *groups_.all);
  model_.gatherer->release_all();

  for (const std::size_t unit : order_) states_[unit].pending = states_[unit].slots.size();
  next_ = 0;
  const bool compares = ends_step && consistency_check_is_due();
  const bool had_gradients = end_pass();
  if (!order_known_) {
    if (const auto agreed =
            data_parallel::agree_on_order(ready_order_, had_gradients, *groups_.all)) {
      order_ = *agreed;
      order_known_ = true;
    }
  }
  ready_order_.clear();
  if (compares) compare_replicas();
}

// Compares what several ranks hold: copies of parts where there are several of the model, and units
// that are whole on every rank.
void GradientSharder::compare_replicas() {
  std::vector<NamedTensor> parts, whole;
  for (const auto& unit : model_.units)
    for (std::size_t member = 0; member < unit->parameters().size(); ++member) {
      const NamedTensor& parameter = unit->parameters()[member];
      parts.push_back({parameter.name, unit->piece(member)});
      if (unit->residence() != Residence::gathered) continue;
      const mesh::Interval range = unit->layout().range(member);
      whole.push_back({parameter.name, unit->flat().narrow(0, range.begin, range.size())});
    }
  data_parallel::check_same_values(whole, *groups_.gather);
  if (groups_.replicas != nullptr) data_parallel::check_same_values(parts, *groups_.replicas);
}

// Says of each parameter whether it has a gradient now: where a rank used it, or it had one before.
void GradientSharder::hand_out(const at::Tensor& used_by) {
  at::Tensor counts;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    bool has_gradient = slot.used || slot.adds;
    if (!has_gradient) {
      if (!counts.defined()) counts = used_by.cpu();
      has_gradient = counts[static_cast<std::int64_t>(index)].item<std::int32_t>() > 0;
    }
    if (has_gradient) absent_->put(index, slot.parameter);
    absent_->forget_zeroing(index);
    slot.ready = slot.used = slot.adds = false;
  }
}

}  // namespace lockstep::shard
