#include <lockstep/parallel/replicate/gradient_reducer.h>

#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <lockstep/base/error.h>

namespace lockstep::replicate {

double StepTotals::count() const { return values[0].item<double>(); }
double StepTotals::mean_loss() const { return (values[1] / values[0]).item<double>(); }

class GradientReducer::Hook : public torch::autograd::FunctionPostHook {
 public:
  Hook(std::weak_ptr<GradientReducer> reducer, std::size_t index)
      : reducer_(std::move(reducer)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (const auto reducer = reducer_.lock()) reducer->on_gradient(index_);
    return outputs;
  }

 private:
  std::weak_ptr<GradientReducer> reducer_;
  std::size_t index_;
};

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

GradientReducer::~GradientReducer() {
  for (Slot& slot : slots_)
    if (slot.accumulator) slot.accumulator->del_post_hook(slot.hook);
}

void GradientReducer::install_hooks() {
  const c10::AutoGradMode grad(true);
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    // Held here: nobody else keeps it alive between passes, and the hook would go with it.
    slot.accumulator = torch::autograd::impl::grad_accumulator(slot.parameter);
    slot.hook = slot.accumulator->add_post_hook(std::make_unique<Hook>(weak_from_this(), index));
  }
}

c10::Device GradientReducer::device() const { return slots_.front().parameter.device(); }

void GradientReducer::set_exchange(bool on) {
  const std::lock_guard lock(mutex_);
  exchange_ = on;
}

void GradientReducer::backward(const at::Tensor& loss_sum, std::int64_t count) {
  {
    const std::lock_guard lock(mutex_);
    check_model();
    if (!divides_by_count()) check_zeroed();
    count_ += count;
    // Not every device has float64.
    const c10::Device place = device().is_cuda() ? device() : c10::Device(at::kCPU);
    const at::Tensor value = loss_sum.defined()
                                 ? loss_sum.detach().reshape({}).to(place).to(at::kDouble)
                                 : at::zeros({}, at::dtype(at::kDouble).device(place));
    loss_sum_ = loss_sum_.defined() ? loss_sum_ + value : value;
    if (exchange_) begin();
  }
  if (loss_sum.defined() && loss_sum.requires_grad()) {
    // Not by a callback of autograd's: that comes at the end of whichever backward the first
    // gradient came from, which may be one inside of this.
    struct Pass {
      explicit Pass(std::atomic<const void*>& owner, const void* reducer) : owner(owner) {
        owner = reducer;
      }
      ~Pass() { owner = nullptr; }
      std::atomic<const void*>& owner;
    };
    const Pass pass(*counted_pass_, this);
    loss_sum.backward();
  }
  const std::lock_guard lock(mutex_);
  if (exchange_) finish();
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
    if (slot.parameter.requires_grad() &&
        torch::autograd::impl::try_get_grad_accumulator(slot.parameter) != slot.accumulator)
      throw UsageError("'{}' was moved to another device or dtype after the model was made data "
                       "parallel, so that its gradients would stay on each rank: move the model "
                       "first",
                       slot.name);
}

// What is left of the step before would be divided a second time.
void GradientReducer::check_zeroed() const {
  for (const Slot& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (!gradient.defined() || slot.handed_out.lock() != gradient.getIntrusivePtr()) continue;
    // Where it was touched since, as by clipping, the version says nothing: looked at once.
    if (gradient._version() == slot.version || (num_exchanges_ == 1 && gradient.any().item<bool>()))
      throw UsageError("the gradient of '{}' is still that of the step before: call zero_grad() "
                       "between steps",
                       slot.name);
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
  if (exchange_ && gradient.requires_grad())
    throw UsageError("the gradient of '{}' is itself part of a graph (create_graph), which "
                     "data parallelism cannot follow through its sums: use no_sync() for that pass",
                     slot.name);
}

void GradientReducer::on_gradient(std::size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  slot.used = true;
  check_gradient(slot);
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
