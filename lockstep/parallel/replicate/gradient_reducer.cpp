#include <lockstep/parallel/replicate/gradient_reducer.h>

#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/error.h>

namespace lockstep::replicate {

std::shared_ptr<GradientReducer> GradientReducer::make(Tensors tensors,
                                                       std::shared_ptr<comm::Communicator> group,
                                                       Options options, CountedPass counted_pass) {
  std::shared_ptr<GradientReducer> reducer(new GradientReducer(
      std::move(tensors), std::move(group), std::move(options), std::move(counted_pass)));
  reducer->install_hooks();
  return reducer;
}

GradientReducer::GradientReducer(Tensors tensors, std::shared_ptr<comm::Communicator> group,
                                 Options options, CountedPass counted_pass)
    : group_(std::move(group)),
      options_(std::move(options)),
      counted_pass_(std::move(counted_pass)),
      frozen_(std::move(tensors.frozen)),
      buffers_(std::move(tensors.buffers)) {
  for (auto& [name, parameter] : tensors.trained)
    slots_.push_back({.name = std::move(name), .parameter = std::move(parameter)});
  // Backward meets the last layers first.
  std::vector<std::size_t> order(slots_.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  build_buckets(order);
}

void GradientReducer::install_hooks() {
  for (std::size_t index = 0; index < slots_.size(); ++index)
    slots_[index].hook = std::make_unique<data_parallel::GradientHook>(
        slots_[index].parameter, [weak = weak_from_this(), index](const at::Tensor& arrived) {
          if (const auto reducer = weak.lock()) reducer->on_gradient(index, arrived);
        });
}

c10::Device GradientReducer::device() const { return slots_.front().parameter.device(); }

void GradientReducer::set_exchange(bool on) {
  const std::lock_guard lock(mutex_);
  exchange_ = on;
}

void GradientReducer::backward(const at::Tensor& loss_sum, std::int64_t count) {
  {
    const std::lock_guard lock(mutex_);
    check_usable();
    check_model();
    if (!divides_by_count()) {
      check_zeroed();
      has_plain_gradients_ = false;
    }
    loss_.add(loss_sum, count, device());
    // Until this pass has ended well: what was counted and sent cannot be taken back.
    broken_ = true;
    if (exchange_) begin();
  }
  if (loss_sum.defined() && loss_sum.requires_grad()) {
    // Not by a callback of autograd's: that comes at the end of whichever backward the first
    // gradient came from, which may be one inside of this.
    const data_parallel::CountedPassGuard pass(counted_pass_, this);
    loss_sum.backward();
  }
  const std::lock_guard lock(mutex_);
  if (exchange_) finish();
  broken_ = false;
}

void GradientReducer::check_usable() const {
  if (broken_)
    throw UsageError("a backward pass before this one ended in an exception, so that this rank's "
                     "samples are counted and its gradients are not: start the ranks anew from a "
                     "checkpoint");
}

// What would otherwise train on each rank by itself, unnoticed.
void GradientReducer::check_model() const {
  for (const auto& [name, parameter] : frozen_)
    if (parameter.requires_grad())
      throw UsageError("'{}' was frozen when the model was made data parallel and is not any more, "
                       "so that its gradients would stay on each rank: set requires_grad before, "
                       "and freeze it afterwards",
                       name);
  for (const Slot& slot : slots_)
    if (slot.parameter.requires_grad() && !slot.hook->hears())
      throw UsageError("'{}' was moved to another device or dtype after the model was made data "
                       "parallel, so that its gradients would stay on each rank: move the model "
                       "first",
                       slot.name);
}

// Before the first counted pass of a step: what is left of the step before would be divided a
// second time, and gradients of mean losses as if they were of summed ones.
void GradientReducer::check_zeroed() const {
  for (const Slot& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (!gradient.defined()) continue;
    // Where it was touched since it was handed out, as by clipping, the version says nothing:
    // looked at once. Where it was not, it may have been zeroed behind autograd's back (data()).
    const bool handed_out = slot.handed_out.lock() == gradient.getIntrusivePtr();
    const bool suspect = gradient._version() == slot.version || num_exchanges_ == 1;
    if (!has_plain_gradients_ && !(handed_out && suspect)) continue;
    if (gradient.any().item<bool>())
      throw UsageError("the gradient of '{}' is still that of {}: call zero_grad() between steps",
                       slot.name,
                       has_plain_gradients_ ? "a loss.backward() before this backward(model, "
                                              "loss_sum, count), and they do not add up"
                                            : "the step before");
  }
}

void GradientReducer::check_gradient(const Slot& slot) const {
  const at::Tensor& gradient = slot.parameter.grad();
  if (gradient.layout() != at::kStrided)
    throw UsageError("the gradient of '{}' is sparse, which cannot be summed over ranks: make it "
                     "dense (for an Embedding, sparse(false))",
                     slot.name);
  if (const void* const other = counted_pass_->load(); other != nullptr && other != this)
    throw UsageError("the gradient of '{}' came in a backward(model, loss_sum, count) of another "
                     "model, whose samples it would not be divided by: register both in one module "
                     "and wrap that",
                     slot.name);
  if (!is_counted_pass() && divides_by_count())
    throw UsageError("the gradient of '{}' came in a loss.backward() after a backward(model, "
                     "loss_sum, count) of the same step, and they do not add up: use one of them",
                     slot.name);
  if (exchange_ && gradient.requires_grad())
    throw UsageError("the gradient of '{}' is itself part of a graph (create_graph), which "
                     "data parallelism cannot follow through its sums: use no_sync() for that pass",
                     slot.name);
}

void GradientReducer::on_gradient(std::size_t index, const at::Tensor& arrived) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  slot.used = true;
  check_gradient(slot);
  if (!is_counted_pass()) has_plain_gradients_ = true;
  // What leaves through a bucket's memory is copied there.
  const bool in_bucket =
      slot.view.defined() && (exchange_ || slot.parameter.grad().is_alias_of(slot.view));
  if (!in_bucket && !data_parallel::is_sole_user(slot.parameter.grad(), arrived))
    slot.parameter.mutable_grad() = slot.parameter.grad().clone();
  if (!exchange_) return;
  if (!in_backward_) {
    in_backward_ = true;
    if (!is_counted_pass()) {
      check_model();
      begin();
      torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
        if (const auto reducer = weak.lock()) {
          const std::lock_guard finishing(reducer->mutex_);
          reducer->finish();
        }
      });
    }
  }
  if (slot.ready)
    throw UsageError("the gradient of '{}' came twice in one backward pass, or the pass before "
                     "ended in an exception: start the ranks anew from a checkpoint",
                     slot.name);
  place(slot);
  ready_order_.push_back(index);
  launch_ready();
}

}  // namespace lockstep::replicate
