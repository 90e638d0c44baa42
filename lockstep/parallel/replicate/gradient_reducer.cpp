#include <lockstep/parallel/replicate/gradient_reducer.h>

#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/replicate/agreement.h>

namespace lockstep::replicate {

namespace {

// Gradients of one dtype on one device share buckets.
std::vector<GradientSize> sizes_of(const std::vector<at::Tensor>& parameters) {
  std::vector<std::pair<at::ScalarType, c10::Device>> kinds;
  std::vector<GradientSize> sizes;
  for (const at::Tensor& parameter : parameters) {
    const std::pair kind(parameter.scalar_type(), parameter.device());
    const auto found = std::find(kinds.begin(), kinds.end(), kind);
    sizes.push_back({.bytes = parameter.nbytes(), .kind = static_cast<int>(found - kinds.begin())});
    if (found == kinds.end()) kinds.push_back(kind);
  }
  return sizes;
}

// The place of a parameter's gradient in a bucket, in the parameter's own layout where it fills its
// memory, so that the update runs through both in one order. No view in autograd's eyes: those
// refuse what optimizers do to gradients (detach_()).
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& parameter) {
  const at::AutoDispatchBelowADInplaceOrView not_tracked;
  const at::Tensor piece = flat.narrow(0, offset, parameter.numel());
  return parameter.is_non_overlapping_and_dense()
             ? piece.as_strided(parameter.sizes(), parameter.strides())
             : piece.view(parameter.sizes());
}

// Some of many names, for a message.
std::string list_names(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kShown; ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", names[i]);
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

}  // namespace

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

std::shared_ptr<GradientReducer> GradientReducer::make(std::vector<NamedTensor> parameters,
                                                       std::vector<NamedTensor> buffers,
                                                       std::shared_ptr<comm::Communicator> group,
                                                       Options options) {
  std::shared_ptr<GradientReducer> reducer(new GradientReducer(
      std::move(parameters), std::move(buffers), std::move(group), std::move(options)));
  reducer->install_hooks();
  return reducer;
}

GradientReducer::GradientReducer(std::vector<NamedTensor> parameters,
                                 std::vector<NamedTensor> buffers,
                                 std::shared_ptr<comm::Communicator> group, Options options)
    : group_(std::move(group)), options_(std::move(options)), buffers_(std::move(buffers)) {
  for (auto& [name, parameter] : parameters)
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

void GradientReducer::build_buckets(const std::vector<std::size_t>& order) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters;
  for (const Slot& slot : slots_) parameters.push_back(slot.parameter);
  const auto sizes = sizes_of(parameters);
  std::vector<Bucket> buckets;
  for (const auto& members : plan_buckets(sizes, order, options_.buckets)) {
    Bucket& bucket = buckets.emplace_back();
    bucket.members = members;
    bucket.pending = members.size();
    bucket.content.index = buckets.size() - 1;
    std::int64_t total = 0;
    for (const std::size_t index : members) total += slots_[index].parameter.numel();
    const at::Tensor& first = slots_[members.front()].parameter;
    bucket.content.flat = first.is_cpu() ? group_->allocate({total}, first.scalar_type())
                                         : at::empty({total}, first.options());
    std::int64_t offset = 0;
    for (const std::size_t index : members) {
      Slot& slot = slots_[index];
      const at::Tensor view = alias(bucket.content.flat, offset, slot.parameter);
      offset += slot.parameter.numel();
      const at::Tensor& gradient = slot.parameter.grad();
      if (gradient.defined() && slot.view.defined() && gradient.is_alias_of(slot.view)) {
        view.copy_(gradient);
        slot.parameter.mutable_grad() = view;
      }
      slot.view = view;
      slot.bucket = bucket.content.index;
      bucket.content.parameters.push_back(slot.name);
      bucket.content.gradients.push_back(view);
    }
  }
  buckets_ = std::move(buckets);
}

void GradientReducer::set_exchange(bool on) {
  const std::lock_guard lock(mutex_);
  exchange_ = on;
}

void GradientReducer::add_loss(const at::Tensor& loss_sum, std::int64_t count) {
  const std::lock_guard lock(mutex_);
  // Who forgets to, forgets from the start: looked at once.
  if (num_exchanges_ == 1 && !divides_by_count()) check_zeroed();
  count_ += count;
  const at::Tensor value = loss_sum.detach().to(at::kDouble);
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + value : value;
}

// What is left of the step before would be divided a second time.
void GradientReducer::check_zeroed() const {
  for (const Slot& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (gradient.defined() && gradient.is_alias_of(slot.view) && gradient.any().item<bool>())
      throw UsageError("the gradient of '{}' is still that of the step before: call zero_grad() "
                       "between steps",
                       slot.name);
  }
}

void GradientReducer::on_gradient(std::size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  slot.used = true;
  const at::Tensor& gradient = slot.parameter.grad();
  if (gradient.layout() != at::kStrided)
    throw UsageError("the gradient of '{}' is sparse, which cannot be summed over ranks: make it "
                     "dense (for an Embedding, sparse(false))",
                     slot.name);
  if (gradient.requires_grad())
    throw UsageError("the gradient of '{}' is itself part of a graph (create_graph), which "
                     "data parallelism cannot follow through its sums: use no_sync() for that pass",
                     slot.name);
  if (!exchange_) return;
  if (!in_backward_) {
    in_backward_ = true;
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
      if (const auto reducer = weak.lock()) {
        const std::lock_guard finishing(reducer->mutex_);
        reducer->finish();
      }
    });
  }
  if (slot.ready)
    throw UsageError("the gradient of '{}' came twice in one backward pass, or the pass before "
                     "ended in an exception: start the ranks anew from a checkpoint",
                     slot.name);
  place(slot);
  ready_order_.push_back(index);
  launch_ready();
}

void GradientReducer::exchange_now() {
  const std::lock_guard lock(mutex_);
  finish();
}

// Puts a gradient into its bucket, where it stays.
void GradientReducer::place(Slot& slot) {
  const c10::NoGradGuard no_grad;
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (!gradient.defined()) {
    slot.view.zero_();
  } else if (!gradient.is_alias_of(slot.view)) {
    slot.view.copy_(gradient);
    gradient = slot.view;
  }
  slot.ready = true;
  --buckets_[slot.bucket].pending;
}

void GradientReducer::launch_ready() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0)
    launch(buckets_[next_bucket_++]);
}

void GradientReducer::launch(Bucket& bucket) {
  if (options_.comm_hook) {
    bucket.complete = options_.comm_hook(bucket.content, *group_);
    return;
  }
  bucket.work = group_->all_reduce(bucket.content.flat,
                                   divides_by_count() ? comm::ReduceOp::sum : comm::ReduceOp::mean);
}

void GradientReducer::refuse_unused(const std::vector<std::size_t>& unused) {
  std::vector<std::string> names;
  for (const std::size_t index : unused) names.push_back(slots_[index].name);
  const std::string reason =
      fmt::format("no gradient reached {} in this backward pass: freeze what is never trained "
                  "(requires_grad), or set find_unused_parameters",
                  list_names(names));
  // The others wait for buckets that will not come.
  group_->abort(reason);
  throw UsageError(reason);
}

// Ends a backward pass, on every rank in the same order: the buckets that were not complete, the
// totals, the buffers.
void GradientReducer::finish() {
  const c10::NoGradGuard no_grad;
  std::vector<std::size_t> unused;
  std::vector<std::size_t> without_gradient;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    if (slot.ready) continue;
    if (!slot.used) unused.push_back(index);
    if (!slot.parameter.grad().defined()) without_gradient.push_back(index);
    place(slot);
    ready_order_.push_back(index);
  }
  if (!options_.find_unused_parameters && !unused.empty() && in_backward_) refuse_unused(unused);
  launch_ready();

  const at::Tensor totals = exchange_totals();
  complete_buckets(totals);
  hand_out(without_gradient, totals);
  if (options_.broadcast_buffers && !buffers_.empty()) broadcast_from_first(buffers_, *group_);

  for (Slot& slot : slots_) slot.ready = slot.used = false;
  for (Bucket& bucket : buckets_) bucket.pending = bucket.members.size();
  next_bucket_ = 0;
  in_backward_ = false;
  count_ = 0;
  loss_sum_ = at::Tensor();
  if (num_exchanges_++ == 0) learn_order();
  ready_order_.clear();
}

// Count, loss, and who used what, over all ranks: one small message. Nothing where nobody asks.
at::Tensor GradientReducer::exchange_totals() {
  if (!divides_by_count() && !options_.find_unused_parameters) return {};
  const at::Tensor host = at::zeros({static_cast<std::int64_t>(2 + slots_.size())}, at::kDouble);
  auto values = host.accessor<double, 1>();
  values[0] = static_cast<double>(count_);
  for (std::size_t index = 0; index < slots_.size(); ++index)
    values[static_cast<std::int64_t>(2 + index)] = slots_[index].used ? 1 : 0;
  at::Tensor totals = host.to(device());
  if (divides_by_count()) totals[1].copy_(loss_sum_);
  group_->all_reduce(totals).wait();
  if (divides_by_count()) totals_.values = totals.narrow(0, 0, 2);
  return totals;
}

void GradientReducer::complete_buckets(const at::Tensor& totals) {
  for (Bucket& bucket : buckets_) {
    if (bucket.complete) {
      std::exchange(bucket.complete, nullptr)();
    } else {
      bucket.work.wait();
      bucket.work = comm::Work();
    }
    // One division of the whole sum, by one formula. A step without a sample has no gradient.
    at::Tensor& flat = bucket.content.flat;
    if (divides_by_count())
      flat.div_(totals[0].clamp_min(1).to(flat.options()));
    else if (options_.comm_hook)
      flat.div_(group_->size());
  }
}

// Gives their gradients to parameters that had none here but were used on another rank; where no
// rank used one it stays without, so that optimizers pass over it as they do in one process.
void GradientReducer::hand_out(const std::vector<std::size_t>& without_gradient,
                               const at::Tensor& totals) {
  if (without_gradient.empty()) return;
  const at::Tensor used_by = totals.defined() ? totals.cpu() : at::Tensor();
  for (const std::size_t index : without_gradient) {
    Slot& slot = slots_[index];
    if (!used_by.defined() || used_by[static_cast<std::int64_t>(2 + index)].item<double>() > 0)
      slot.parameter.mutable_grad() = slot.view;
  }
}

void GradientReducer::learn_order() {
  std::vector<std::int64_t> mine(ready_order_.begin(), ready_order_.end());
  at::Tensor order = at::tensor(mine, at::kLong).to(device());
  group_->broadcast(order, 0).wait();
  order = order.cpu();
  std::vector<std::size_t> agreed;
  for (std::int64_t i = 0; i < order.numel(); ++i)
    agreed.push_back(static_cast<std::size_t>(order[i].item<std::int64_t>()));
  build_buckets(agreed);
}

}  // namespace lockstep::replicate
