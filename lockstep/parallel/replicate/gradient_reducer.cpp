#include <lockstep/parallel/replicate/gradient_reducer.h>

#include <numeric>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::replicate {

std::shared_ptr<GradientReducer> GradientReducer::make(Tensors tensors,
                                                       std::shared_ptr<comm::Communicator> group,
                                                       Options options, CountedPass counted_pass) {
  std::shared_ptr<GradientReducer> reducer(new GradientReducer(
      std::move(tensors), std::move(group), std::move(options), std::move(counted_pass)));
  for (std::size_t index = 0; index < reducer->slots_.size(); ++index)
    reducer->slots_[index].hook = reducer->hear_of(reducer->slots_[index].parameter, index);
  return reducer;
}

GradientReducer::GradientReducer(Tensors tensors, std::shared_ptr<comm::Communicator> group,
                                 Options options, CountedPass counted_pass)
    : GradientExchange(std::move(group), tensors.trained.front().tensor.device(),
                       std::move(counted_pass)),
      options_(std::move(options)),
      frozen_(std::move(tensors.frozen)),
      buffers_(std::move(tensors.buffers)) {
  for (auto& [name, parameter] : tensors.trained)
    slots_.push_back({.name = std::move(name), .parameter = std::move(parameter)});
  // Backward meets the last layers first.
  std::vector<std::size_t> order(slots_.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  build_buckets(order);
}

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

// What is left of the step before would be divided a second time, and gradients of mean losses as
// if they were of summed ones.
void GradientReducer::check_zeroed() const {
  for (const Slot& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (!gradient.defined()) continue;
    // Where it was touched since it was handed out, as by clipping, the version says nothing:
    // looked at once. Where it was not, it may have been zeroed behind autograd's back (data()).
    const bool handed_out = slot.handed_out.lock() == gradient.getIntrusivePtr();
    const bool suspect = gradient._version() == slot.version || num_exchanges() == 1;
    if (!has_plain_gradients_ && !(handed_out && suspect)) continue;
    if (gradient.any().item<bool>()) refuse_unzeroed(slot.name);
  }
}

void GradientReducer::on_gradient(std::size_t index, const at::Tensor& arrived) {
  Slot& slot = slots_[index];
  slot.used = true;
  check_gradient(slot.name, slot.parameter.grad());
  if (exchange() && slot.parameter.grad().requires_grad())
    throw UsageError("the gradient of '{}' is itself part of a graph (create_graph), which "
                     "data parallelism cannot follow through its sums: use no_sync() for that pass",
                     slot.name);
  if (!is_counted_pass()) has_plain_gradients_ = true;
  // What leaves through a bucket's memory is copied there.
  const bool in_bucket =
      slot.view.defined() && (exchange() || slot.parameter.grad().is_alias_of(slot.view));
  if (!in_bucket && !data_parallel::is_sole_user(slot.parameter.grad(), arrived))
    slot.parameter.mutable_grad() = slot.parameter.grad().clone();
  if (!exchange()) return;
  enter_pass();
  if (slot.ready) refuse_second(slot.name);
  place(slot);
  ready_order_.push_back(index);
  launch_ready();
}

}  // namespace lockstep::replicate
