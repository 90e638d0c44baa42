#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/replicate/gradient_reducer.h>
#include <lockstep/parallel/replicate/options.h>

namespace lockstep::replicate {

std::vector<std::vector<std::size_t>> plan_buckets(std::span<const GradientSize> gradients,
                                                   std::span<const std::size_t> order,
                                                   const BucketLimits& limits) {
  struct Open {
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
  };
  std::vector<std::vector<std::size_t>> buckets;
  std::map<int, Open> open;  // one for each kind
  const auto close = [&](Open& bucket) {
    buckets.push_back(std::move(bucket.members));
    bucket = Open{};
  };
  for (const std::size_t index : order) {
    const GradientSize& gradient = gradients[index];
    const std::size_t limit = buckets.empty() ? limits.first_bytes : limits.bytes;
    Open& bucket = open[gradient.kind];
    if (!bucket.members.empty() && bucket.bytes + gradient.bytes > limit) close(bucket);
    bucket.members.push_back(index);
    bucket.bytes += gradient.bytes;
    if (bucket.bytes >= limit) close(bucket);
  }
  for (auto& [kind, bucket] : open)
    if (!bucket.members.empty()) close(bucket);
  return buckets;
}

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

// A gradient has the same layout on every rank: the parameter's own if that fills its memory, so
// that the update goes through both in one order.
bool has_own_strides(const at::Tensor& parameter) {
  return parameter.is_contiguous() || parameter.is_non_overlapping_and_dense();
}

std::vector<std::int64_t> gradient_strides(const at::Tensor& parameter) {
  if (has_own_strides(parameter)) return parameter.strides().vec();
  std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()), 1);
  for (std::size_t dim = strides.size(); dim-- > 1;)
    strides[dim - 1] = strides[dim] * parameter.size(static_cast<std::int64_t>(dim));
  return strides;
}

// A parameter's gradient in a bucket. Autograd must not take it for a view, because views refuse
// detach_(), which optimizers call on gradients.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& parameter) {
  const at::AutoDispatchBelowADInplaceOrView not_tracked;
  return flat.narrow(0, offset, parameter.numel())
      .as_strided(parameter.sizes(), gradient_strides(parameter));
}

// Whether a gradient can be sent from where it is: it has the layout that all ranks use, and the
// parameter's type, which a gradient from before to(dtype) has not.
bool can_leave(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (gradient.scalar_type() != parameter.scalar_type() || gradient.device() != parameter.device())
    return false;
  return has_own_strides(parameter)
             ? gradient.strides() == parameter.strides()
             : gradient.strides() == at::IntArrayRef(gradient_strides(parameter));
}

// A gradient's memory from end to end, as a tensor. Usually that is the gradient itself: making a
// view takes longer than sending a small gradient.
at::Tensor flat_alias(const at::Tensor& gradient) {
  if (gradient.is_contiguous()) return gradient;
  const at::AutoDispatchBelowADInplaceOrView not_tracked;
  return gradient.as_strided({gradient.numel()}, {1});
}

// target.copy_(source) without the cost of an operator, which for small gradients on a CPU is
// larger than that of the copy.
void copy_into(const at::Tensor& target, const at::Tensor& source) {
  const bool same_layout = source.is_cpu() && target.is_cpu() && source.is_contiguous() &&
                           target.is_contiguous() && source.dtype() == target.dtype() &&
                           !source.is_conj() && !source.is_neg();
  if (!same_layout) {
    target.copy_(source);
    return;
  }
  if (source.numel() > 0) std::memcpy(target.data_ptr(), source.data_ptr(), source.nbytes());
  target.unsafeGetTensorImpl()->bump_version();
}

// The first few names, for a message.
std::string list_names(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kShown; ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", names[i]);
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

}  // namespace

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
    const bool has_memory = needs_memory(members);
    for (const std::size_t index : members) {
      slots_[index].bucket = bucket.content.index;
      if (!has_memory) slots_[index].view = at::Tensor();
    }
    if (!has_memory) continue;
    bucket.content.flat = first.is_cpu() ? group().allocate({total}, first.scalar_type())
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
      bucket.content.parameters.push_back(slot.name);
      bucket.content.gradients.push_back(view);
    }
  }
  buckets_ = std::move(buckets);
}

// Whether a bucket needs memory of its own. Collectives of a GPU want one long array, and a hook is
// promised one. Between CPUs, copying gradients into one costs more than the messages that it
// saves, except for small gradients.
bool GradientReducer::needs_memory(std::span<const std::size_t> members) const {
  if (options_.comm_hook || !slots_[members.front()].parameter.is_cpu()) return true;
  constexpr std::size_t kSmallBytes = std::size_t{16} << 10;
  std::size_t bytes = 0;
  for (const std::size_t index : members) bytes += slots_[index].parameter.nbytes();
  return members.size() > 1 && bytes <= members.size() * kSmallBytes;
}

void GradientReducer::note_handed_out(Slot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  if (slot.handed_out._unsafe_get_target() != gradient.unsafeGetTensorImpl())
    slot.handed_out = c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr());
  if (gradient.defined()) slot.version = gradient._version();
}

// Makes a gradient ready to be sent: moves it to its bucket's memory for good, or leaves it where
// it is.
void GradientReducer::place(Slot& slot) {
  const c10::NoGradGuard no_grad;
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (slot.view.defined()) {
    if (!gradient.defined()) {
      slot.view.zero_();
    } else if (!gradient.is_alias_of(slot.view)) {
      copy_into(slot.view, gradient);
      gradient = slot.view;
    }
  } else {
    if (!gradient.defined() || !can_leave(gradient, slot.parameter)) {
      const at::Tensor own = at::empty_strided(
          slot.parameter.sizes(), gradient_strides(slot.parameter), slot.parameter.options());
      if (gradient.defined())
        gradient = own.copy_(gradient);
      else
        slot.stand_in = own.zero_();
    }
    // The sum is written in place, and does not change the version.
    note_handed_out(slot);
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
    bucket.complete = options_.comm_hook(bucket.content, group());
    return;
  }
  const bool divided = divided_in_flight();
  comm::CallOptions options;
  if (divided && divides_by_count()) options.divisor = loss_.divisor();
  const comm::ReduceOp op = divided ? comm::ReduceOp::mean : comm::ReduceOp::sum;
  bucket.work = group().all_reduce(memory_of(bucket), op, options);
}

// The memory that a bucket's sums are written to.
std::vector<at::Tensor> GradientReducer::memory_of(const Bucket& bucket) const {
  if (bucket.content.flat.defined()) return {bucket.content.flat};
  std::vector<at::Tensor> gradients;
  for (const std::size_t index : bucket.members) {
    const Slot& slot = slots_[index];
    gradients.push_back(
        flat_alias(slot.stand_in.defined() ? slot.stand_in : slot.parameter.grad()));
  }
  return gradients;
}

// Whether the collective divides the sum, which saves a pass over the gradients. On other devices
// than the CPU the host does not know the count, and a pass costs little.
// Sums over several passes are divided once all are there.
bool GradientReducer::divided_in_flight() const {
  if (options_.comm_hook || is_partial() || has_partial_sums()) return false;
  return !divides_by_count() || loss_.divides_in_flight();
}

void GradientReducer::refuse_unused(const std::vector<std::size_t>& unused) {
  std::vector<std::string> names;
  for (const std::size_t index : unused) names.push_back(slots_[index].name);
  const std::string reason =
      fmt::format("no gradient reached {} in this backward pass: freeze what is never trained "
                  "(requires_grad) before the model is made data parallel, or set "
                  "find_unused_parameters",
                  list_names(names));
  // Other ranks wait for buckets that will not come.
  group().abort(reason);
  throw UsageError(reason);
}

// Ends a backward pass. Every rank sends in the same order: the buckets that were not complete,
// which parameters it used, the buffers.
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

  const at::Tensor used_by = exchange_usage();
  complete_buckets();
  hand_out(without_gradient, used_by);
  const bool ends_step = !is_partial();
  if (has_partial_sums()) add_earlier_passes();
  if (options_.broadcast_buffers && !buffers_.empty() && ends_step)
    data_parallel::broadcast_from_first(buffers_, group());

  for (Slot& slot : slots_) {
    slot.ready = false;
    if (ends_step) slot.used = false;
  }
  for (Bucket& bucket : buckets_) bucket.pending = bucket.members.size();
  next_bucket_ = 0;
  // Parameters are also compared after they were loaded, maybe on one rank alone.
  const bool compares = ends_step && (were_moved_anywhere(used_by) || consistency_check_is_due());
  if (ends_step) moved_ = unexchanged_ = false;
  has_plain_gradients_ = false;
  const bool had_gradients = end_pass();
  if (!order_known_) learn_order(had_gradients);
  ready_order_.clear();
  for (Slot& slot : slots_)
    if (slot.view.defined()) note_handed_out(slot);
  if (compares) compare_parameters();
}

// On how many ranks each parameter was used, and on how many any parameter has other memory than
// before; one small message. Undefined where find_unused_parameters is off.
at::Tensor GradientReducer::exchange_usage() {
  if (!options_.find_unused_parameters) return {};
  std::vector<std::int64_t> used;
  for (const Slot& slot : slots_) used.push_back(slot.used ? 1 : 0);
  used.push_back(moved_ ? 1 : 0);
  const bool alone = group().size() == 1;
  at::Tensor used_by = device::on_device(used, at::kInt, alone ? c10::Device(at::kCPU) : device());
  if (!alone) group().all_reduce(used_by).wait();
  return used_by;
}

// Whether parameters were given other memory on any rank, as by torch::load(). If exchange_usage()
// does not tell the host, ranks send each other one more number. A host that runs ahead of its
// device does not wait for it: the answer is then the one of the pass before.
bool GradientReducer::were_moved_anywhere(const at::Tensor& used_by) {
  if (!checks_consistency() || group().size() == 1) return false;
  if (used_by.defined() && used_by.is_cpu())
    return used_by[static_cast<std::int64_t>(slots_.size())].item<std::int32_t>() > 0;
  const auto answer = [&] {
    if (!moved_on_.defined()) return false;
    telling_moved_.wait_on_host();
    return std::exchange(moved_on_, at::Tensor()).item<std::int32_t>() > 0;
  };
  const bool before = answer();
  moved_on_ = at::full({1}, moved_ ? 1 : 0, at::kInt);
  telling_moved_ = group().all_reduce(moved_on_);
  return device().is_cpu() ? answer() : before;
}

void GradientReducer::compare_parameters() {
  std::vector<NamedTensor> parameters;
  for (const Placed& frozen : frozen_) parameters.push_back({frozen.name, frozen.parameter});
  for (const Slot& slot : slots_) parameters.push_back({slot.name, slot.parameter});
  data_parallel::check_same_values(parameters, group());
}

void GradientReducer::check_same_gradients() {
  const std::lock_guard lock(mutex_);
  if (!checks_consistency()) return;
  std::vector<NamedTensor> gradients;
  for (const Slot& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    gradients.push_back({slot.name, gradient.defined() ? gradient : at::empty({0})});
  }
  data_parallel::check_same_values(
      gradients, group(),
      {.things = "gradients",
       .advice = "This step follows no backward pass that exchanged them: gradients that a program "
                 "makes itself, as by torch::autograd::grad(), are each rank's own until it sums "
                 "them, as with dist.world()->all_reduce(). consistency_check_interval = 0 turns "
                 "this check off"});
}

void GradientReducer::complete_buckets() {
  if (divides_by_count() && !is_partial()) loss_.finish();
  const bool divides_here = !divided_in_flight() && !is_partial() && !has_partial_sums();
  for (Bucket& bucket : buckets_) {
    if (bucket.complete) {
      std::exchange(bucket.complete, nullptr)();
    } else {
      bucket.work.wait();
      bucket.work = comm::Work();
    }
    // The whole sum is divided once.
    if (divides_here)
      for (at::Tensor& sums : memory_of(bucket)) {
        if (divides_by_count())
          loss_.divide(sums);
        else
          sums.div_(group().size());
      }
  }
}

// Gradients become the sums over all passes of the step so far; those of a whole step are divided.
void GradientReducer::add_earlier_passes() {
  sums_are_aside_ = false;
  for (Slot& slot : slots_) {
    at::Tensor& gradient = slot.parameter.mutable_grad();
    const at::Tensor sums = std::exchange(slot.sums, at::Tensor());
    if (!gradient.defined() && sums.defined())
      gradient = slot.view.defined() ? slot.view.copy_(sums) : sums;
    else if (sums.defined())
      gradient.add_(sums);
    if (!gradient.defined()) continue;
    if (!is_partial()) loss_.divide(gradient);
    note_handed_out(slot);
  }
}

// Gives gradients to parameters that had none here but were used on another rank. A parameter that
// no rank used stays without one, so that optimizers skip it as in one process.
void GradientReducer::hand_out(const std::vector<std::size_t>& without_gradient,
                               const at::Tensor& used_by) {
  const at::Tensor counts =
      used_by.defined() && !without_gradient.empty() ? used_by.cpu() : at::Tensor();
  for (const std::size_t index : without_gradient) {
    Slot& slot = slots_[index];
    const at::Tensor stand_in = std::exchange(slot.stand_in, at::Tensor());
    if (!counts.defined() || counts[static_cast<std::int64_t>(index)].item<std::int32_t>() > 0)
      slot.parameter.mutable_grad() = slot.view.defined() ? slot.view : stand_in;
    note_handed_out(slot);
  }
}

void GradientReducer::learn_order(bool had_gradients) {
  const auto agreed = data_parallel::agree_on_order(ready_order_, had_gradients, group());
  if (!agreed) return;
  build_buckets(*agreed);
  order_known_ = true;
}

}  // namespace lockstep::replicate
