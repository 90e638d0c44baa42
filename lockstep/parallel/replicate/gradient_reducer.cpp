#include <lockstep/parallel/replicate/gradient_reducer.h>

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/base/log.h>

namespace lockstep::replicate {

std::shared_ptr<GradientReducer> GradientReducer::make(
    const data_parallel::RegisteredParameters& module, Tensors tensors,
    std::shared_ptr<comm::Communicator> group, Options options, CountedPass counted_pass) {
  std::shared_ptr<GradientReducer> reducer(new GradientReducer(
      module, std::move(tensors), std::move(group), std::move(options), std::move(counted_pass)));
  std::vector<NamedTensor> trained;
  for (std::size_t index = 0; index < reducer->slots_.size(); ++index) {
    Slot& slot = reducer->slots_[index];
    slot.hook = reducer->hear_of(slot.parameter, index);
    trained.push_back({slot.name, slot.parameter});
  }
  reducer->listen(std::move(trained));
  return reducer;
}

GradientReducer::GradientReducer(const data_parallel::RegisteredParameters& module, Tensors tensors,
                                 std::shared_ptr<comm::Communicator> group, Options options,
                                 CountedPass counted_pass)
    : GradientExchange(module, std::move(group), tensors.trained.front().tensor.device(),
                       std::move(counted_pass)),
      options_(std::move(options)),
      take_back_(std::move(tensors.take_back)),
      buffers_(std::move(tensors.buffers)) {
  for (auto& [name, parameter] : tensors.trained) slots_.emplace_back(std::move(name), parameter);
  for (auto& [name, parameter] : tensors.frozen) frozen_.emplace_back(std::move(name), parameter);
  // Backward reaches the last layers first.
  std::vector<std::size_t> order(slots_.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  build_buckets(order);
}

GradientReducer::Placed::Placed(std::string its_name, at::Tensor tensor)
    : name(std::move(its_name)), parameter(std::move(tensor)) {
  note_place();
}

bool GradientReducer::Placed::has_moved() const {
  return memory._unsafe_get_target() !=
             parameter.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() ||
         type != parameter.scalar_type();
}

void GradientReducer::Placed::note_place() {
  memory = parameter.storage().getWeakStorageImpl();
  type = parameter.scalar_type();
}

GradientReducer::~GradientReducer() {
  for (Slot& slot : slots_) {
    take_out_of_bucket(slot);
    leave(slot.parameter);
  }
}

// A bucket on the CPU lies in memory of the group. A rank that was stopped in the middle of a call
// may write there long after the group has failed.
void GradientReducer::take_out_of_bucket(Slot& slot) noexcept {
  try {
    const c10::NoGradGuard no_grad;
    at::Tensor& gradient = slot.parameter.mutable_grad();
    if (slot.view.defined() && slot.view.is_cpu() && gradient.defined() &&
        gradient.is_alias_of(slot.view))
      gradient = gradient.clone();
  } catch (const std::exception&) {
    slot.parameter.mutable_grad() = at::Tensor();
  }
}

GradientReducer::Glimpse GradientReducer::glimpse(const at::Tensor& parameter) {
  Glimpse result{.version = static_cast<std::uint32_t>(parameter._version())};
  if (!parameter.is_cpu() || parameter.numel() == 0) return result;
  constexpr std::size_t kBytes = 64;
  const std::size_t there =
      parameter.is_non_overlapping_and_dense() ? parameter.nbytes() : parameter.element_size();
  result.first_bytes = hash_memory(
      std::span(static_cast<const std::byte*>(parameter.data_ptr()), std::min(there, kBytes)));
  return result;
}

void GradientReducer::check_parameters() {
  for (Placed& frozen : frozen_) {
    if (frozen.parameter.requires_grad())
      throw UsageError("'{}' was frozen when the model was made data parallel and is not any more, "
                       "so that its gradients would stay on each rank: set requires_grad before, "
                       "and freeze it afterwards",
                       frozen.name);
    // One rank alone may have loaded it: ranks compare what they hold at the next exchange.
    if (!frozen.has_moved()) continue;
    frozen.note_place();
    moved_ = true;
  }
  bool moved = false;
  for (const Slot& slot : slots_) {
    if (slot.has_moved())
      moved = true;
    else if (unexchanged_ && slot.used && slot.before != glimpse(slot.parameter))
      throw UsageError(
          "'{}' was changed after backward passes under no_sync() or accumulate(): an "
          "optimizer has stepped on this rank's gradients alone, or on those of a part "
          "of the step. The last backward pass before a step must be under neither; "
          "start the ranks anew from a checkpoint",
          slot.name);
  }
  if (moved) follow_moved();
  // A parameter that had another type for a while has lost its hook, even if its memory is the
  // same. A frozen parameter has nothing to hook into.
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    if (slot.parameter.requires_grad() && !slot.hook->hears())
      hear_again(slot.hook, slot.name, slot.parameter, index);
  }
}

// Parameters have other memory or types: LibTorch has then dropped the accumulators with our hooks,
// and buckets may mix kinds.
void GradientReducer::follow_moved() {
  if (take_back_) take_back_();
  std::size_t num_moved = 0;
  std::string first;
  std::vector<std::size_t> order;
  for (const Bucket& bucket : buckets_)
    order.insert(order.end(), bucket.members.begin(), bucket.members.end());
  for (Slot& slot : slots_) {
    slot.before = glimpse(slot.parameter);
    if (!slot.has_moved()) continue;
    if (num_moved++ == 0) first = slot.name;
    slot.note_place();
  }
  moved_ = true;
  if (num_moved == 0) return;
  set_device(slots_.front().parameter.device());
  build_buckets(order);
  log::info("'{}'{} given other memory after the model was made data parallel, as torch::load() "
            "and to() do: gradients are summed over the ranks as before",
            first, num_moved == 1 ? " was" : fmt::format(" and {} more were", num_moved - 1));
}

void GradientReducer::check_exchanged() {
  const std::lock_guard lock(mutex_);
  if (!unexchanged_) return;
  for (const Slot& slot : slots_) {
    if (!slot.used || !slot.parameter.grad().defined()) continue;
    if (has_partial_sums())
      throw UsageError("the gradient of '{}' is a sum that is not divided yet, as further passes "
                       "were to follow: the last backward pass before a step must not be under "
                       "accumulate()",
                       slot.name);
    throw UsageError("the gradient of '{}' is this rank's alone: the last backward pass before a "
                     "step must exchange gradients, so not be under no_sync() or accumulate()",
                     slot.name);
  }
}

void GradientReducer::parameters_written() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) slot.before = glimpse(slot.parameter);
  forget_writes();
}

// Gradients that are left from the step before would be divided a second time, and gradients of
// mean losses would be divided like those of summed ones.
void GradientReducer::check_zeroed() const {
  for (const Slot& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (!gradient.defined()) continue;
    // If it was changed since the optimizer got it, as by clipping, the version tells nothing, and
    // its values are looked at once. If not, it may have been zeroed without autograd's notice
    // (data()).
    const bool handed_out = slot.handed_out.lock() == gradient.getIntrusivePtr();
    const bool suspect = gradient._version() == slot.version || num_exchanges() == 1;
    if (!has_plain_gradients_ && !(handed_out && suspect)) continue;
    if (gradient.any().item<bool>()) refuse_unzeroed(slot.name);
  }
}

// A bucket's memory is used again in the pass that begins.
void GradientReducer::set_sums_aside() {
  // Gradients that came since, under no_sync(), are this rank's alone: the next exchange sums them.
  if (std::exchange(sums_are_aside_, true)) return;
  const c10::NoGradGuard no_grad;
  for (Slot& slot : slots_) {
    at::Tensor& gradient = slot.parameter.mutable_grad();
    if (!gradient.defined()) continue;
    const bool in_bucket = slot.view.defined() && gradient.is_alias_of(slot.view);
    slot.sums = in_bucket ? gradient.clone() : gradient;
    gradient = at::Tensor();
  }
}

// An optimizer has dropped all gradients: passes whose gradients wait for further ones were given
// up.
void GradientReducer::forget_dropped() {
  if (std::ranges::any_of(slots_, [](const Slot& slot) { return slot.parameter.grad().defined(); }))
    return;
  for (Slot& slot : slots_) {
    slot.sums = at::Tensor();
    slot.used = false;
  }
  sums_are_aside_ = unexchanged_ = false;
  forget_passes();
}

void GradientReducer::on_gradient(std::size_t index, const at::Tensor& arrived) {
  Slot& slot = slots_[index];
  if (!exchange() || is_partial()) {
    if (!slot.used) slot.before = glimpse(slot.parameter);
    unexchanged_ = true;
    wait_for_exchange(index);
  }
  slot.used = true;
  check_gradient(slot.name, slot.parameter.grad());
  if (exchange() && slot.parameter.grad().requires_grad())
    throw UsageError("the gradient of '{}' is itself part of a graph (create_graph), which "
                     "data parallelism cannot follow through its sums: use no_sync() for that pass",
                     slot.name);
  if (!is_counted_pass()) has_plain_gradients_ = true;
  // A gradient that is sent from a bucket's memory is copied there.
  const bool in_bucket =
      slot.view.defined() && (exchange() || slot.parameter.grad().is_alias_of(slot.view));
  if (!in_bucket && !intercept::is_sole_user(slot.parameter.grad(), arrived))
    slot.parameter.mutable_grad() = slot.parameter.grad().clone();
  if (!exchange()) return;
  enter_pass();
  if (slot.ready) refuse_second(slot.name);
  place(slot);
  if (!order_known_) ready_order_.push_back(index);
  launch_ready();
}

}  // namespace lockstep::replicate
