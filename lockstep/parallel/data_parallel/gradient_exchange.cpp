#include <lockstep/parallel/data_parallel/gradient_exchange.h>

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/log.h>

namespace lockstep::data_parallel {

GradientExchange::GradientExchange(const RegisteredParameters& registered,
                                   std::shared_ptr<comm::Communicator> group, c10::Device device,
                                   CountedPass counted_pass)
    : registered_(registered),
      group_(std::move(group)),
      device_(device),
      counted_pass_(std::move(counted_pass)) {}

std::unique_ptr<intercept::GradientHook> GradientExchange::hear_of(const at::Tensor& parameter,
                                                                   std::size_t index) {
  return std::make_unique<intercept::GradientHook>(
      parameter, [weak = weak_from_this(), index,
                  part = parameter.unsafeGetTensorImpl()](const at::Tensor& arrived) {
        if (const auto self = weak.lock()) {
          const std::lock_guard lock(self->mutex_);
          self->on_gradient(index, arrived);
          if (!self->exchange()) self->registered_.show_gradient_of(part);
        }
      });
}

void GradientExchange::hear_again(std::unique_ptr<intercept::GradientHook>& hook,
                                  const std::string& name, const at::Tensor& parameter,
                                  std::size_t index) {
  if (hook->is_in_graph()) dropped_.push_back({name, std::move(hook)});
  hook = hear_of(parameter, index);
}

void GradientExchange::listen(std::vector<NamedTensor> trained) {
  writes_ = std::make_shared<WriteGuard>(
      std::move(trained),
      [group = group_](const UsageError& refusal) { group->note_refusal(refusal.what()); });
  intercept::add_pass_listener(shared_from_this());
}

void GradientExchange::set_exchange(bool on) {
  const std::lock_guard lock(mutex_);
  exchange_ = on;
}

void GradientExchange::set_more_passes(bool on) {
  const std::lock_guard lock(mutex_);
  more_passes_ = on;
}

void GradientExchange::forget_passes() {
  loss_.clear();
  has_partial_sums_ = false;
}

std::string GradientExchange::why_left() const {
  return fmt::format("the module '{}' was spread over the ranks {}, so that its gradients would "
                     "stay on each rank: keep what {} returned for as long as the model is trained",
                     registered_.module_name(),
                     any_part_lives() ? "by a manager that is gone" : "and is gone",
                     any_part_lives() ? "setup_distributed()" : "wrap_model()");
}

void GradientExchange::leave(const at::Tensor& parameter) const noexcept {
  if (group_->size() == 1) return;
  // A parameter that holds whole numbers by now cannot be trained.
  if (!c10::isFloatingType(parameter.scalar_type())) return;
  try {
    intercept::GradientHook::refuse_gradients(parameter, why_left());
  } catch (const std::exception& error) {
    log::warn(
        "gradients of the module '{}' stay on each rank from now on, and a backward pass will "
        "not say so: {}",
        registered_.module_name(), error.what());
  }
}

void GradientExchange::check_model() {
  const std::lock_guard lock(mutex_);
  run_check([this] { look_at_model(); });
}

void GradientExchange::follow_dropped() {
  const std::lock_guard lock(mutex_);
  registered_.follow_shown();
  forget_dropped();
}

void GradientExchange::look_at_model() {
  registered_.check_unchanged();
  registered_.follow_shown();
  check_parameters();
}

// In a backward() here the model has been looked at, and so it has where one of its passes is under
// way: another model's pass must not wait for what that one waits for.
void GradientExchange::before_pass(const intercept::Pass& pass) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  run_check([&] {
    if (!any_part_lives()) return refuse_gone(pass);
    if (!is_counted_pass()) look_before(pass);
    refuse_converted(pass);
  });
}

// Nothing is followed any more that is done to parameters whose modules are gone.
void GradientExchange::refuse_gone(const intercept::Pass& pass) const {
  if (group_->size() > 1 && pass.reaches(registered_.all())) throw UsageError("{}", why_left());
}

void GradientExchange::look_before(const intercept::Pass& pass) {
  refusal_ = nullptr;
  try {
    look_at_model();
    begin_pass();
  } catch (const UsageError&) {
    if (pass.reaches(registered_.all())) throw;
    refusal_ = std::current_exception();
  }
}

void GradientExchange::before_inner_pass(const intercept::Pass& pass) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  run_check([&] {
    if (refusal_ != nullptr && pass.reaches(registered_.all())) std::rethrow_exception(refusal_);
    refuse_converted(pass);
  });
}

void GradientExchange::refuse_converted(const intercept::Pass& pass) {
  std::erase_if(dropped_, [](const Dropped& one) { return !one.hook->is_in_graph(); });
  if (dropped_.empty()) return;
  std::vector<const intercept::GradientHook*> hooks;
  for (const Dropped& one : dropped_) hooks.push_back(one.hook.get());
  const intercept::GradientHook* const reached = pass.reached_of(hooks);
  if (reached == nullptr) return;
  const auto found =
      std::ranges::find_if(dropped_, [&](const Dropped& one) { return one.hook.get() == reached; });
  throw UsageError(
      "'{}' was converted between forward and backward, as to(dtype), to(device) and a "
      "torch::load() of another dtype do, so that this pass would be for what it was "
      "before: run forward again, and convert the model before it",
      found->name);
}

void GradientExchange::begin_pass() {
  if (!exchange() || (more_passes_ && !cuts_sums_)) writes_->watch();
  writes_->begin_pass();
}

void GradientExchange::check_before() {
  if (broken_)
    throw UsageError("a backward pass before this one ended in an exception, so that this rank's "
                     "samples are counted and its gradients are not: start the ranks anew from a "
                     "checkpoint");
  refusal_ = nullptr;
  look_at_model();
  begin_pass();
  if (divides_by_count()) return;
  check_zeroed();
  has_plain_gradients_ = false;
}

void GradientExchange::backward_passes(const std::function<CountedSum()>& passes) {
  bool exchanges = false;
  {
    const std::lock_guard lock(mutex_);
    run_check([this] { check_before(); });
    broken_ = true;
    if (has_partial_sums_) set_sums_aside();
    exchanges = std::exchange(exchange_, false);
  }
  CountedSum loss;
  {
    const CountedPassGuard pass(counted_pass_, this);
    loss = passes();
  }
  const std::lock_guard lock(mutex_);
  exchange_ = exchanges;
  loss_.add(loss.loss_sum, loss.count, device_);
  if (exchange()) {
    begin();
    end_exchange();
  }
  broken_ = false;
}

void GradientExchange::backward(const at::Tensor& loss_sum, std::int64_t count) {
  {
    const std::lock_guard lock(mutex_);
    run_check([&] {
      check_before();
      if (!loss_sum.defined() || !loss_sum.requires_grad()) return;
      const torch::autograd::edge_list roots{torch::autograd::impl::gradient_edge(loss_sum)};
      refuse_converted(intercept::Pass(roots, {}));
    });
    loss_.add(loss_sum, count, device_);
    // Until this pass has ended well: what was counted and sent cannot be taken back.
    broken_ = true;
    if (has_partial_sums_) set_sums_aside();
    if (exchange()) begin();
  }
  if (loss_sum.defined() && loss_sum.requires_grad()) {
    // Not by a callback of autograd's: that comes at the end of whichever backward the first
    // gradient came from, which may be one inside of this.
    const CountedPassGuard pass(counted_pass_, this);
    loss_sum.backward();
  }
  const std::lock_guard lock(mutex_);
  if (exchange()) end_exchange();
  broken_ = false;
}

// The count that sums are divided by is on its way before the first of them, and there when that
// one is added up.
void GradientExchange::begin() {
  if (divides_by_count() && !is_partial()) loss_.exchange(*group_);
}

void GradientExchange::enter_pass() {
  if (in_backward_) return;
  in_backward_ = true;
  if (is_counted_pass()) return;
  begin();
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      const std::lock_guard lock(self->mutex_);
      self->end_exchange();
    }
  });
}

// Parameters show the gradients of their parts once these lie where they stay.
void GradientExchange::end_exchange() {
  finish();
  registered_.show_gradients();
}

bool GradientExchange::end_pass() {
  has_partial_sums_ = is_partial();
  if (!has_partial_sums_) {
    loss_.clear();
    writes_->end();
    ++num_exchanges_;
  }
  return std::exchange(in_backward_, false);
}

void GradientExchange::check_gradient(const std::string& name, const at::Tensor& gradient) const {
  if (gradient.layout() != at::kStrided)
    throw UsageError("the gradient of '{}' is sparse, which cannot be summed over ranks: make it "
                     "dense (for an Embedding, sparse(false))",
                     name);
  if (const void* const other = counted_pass_->load(); other != nullptr && other != this)
    throw UsageError("the gradient of '{}' came in a backward(model, loss_sum, count) of another "
                     "model, whose samples it would not be divided by: register both in one module "
                     "and wrap that",
                     name);
  if (!is_counted_pass() && divides_by_count())
    throw UsageError("the gradient of '{}' came in a loss.backward() after a backward(model, "
                     "loss_sum, count) of the same step, and they do not add up: use one of them",
                     name);
}

void GradientExchange::refuse_unzeroed(const std::string& name) const {
  throw UsageError("the gradient of '{}' is still that of {}: call zero_grad() between steps", name,
                   has_plain_gradients_ ? "a loss.backward() before this backward(model, "
                                          "loss_sum, count), and they do not add up"
                                        : "the step before");
}

void GradientExchange::refuse_second(const std::string& name) {
  throw UsageError("the gradient of '{}' came twice in one backward pass, or the pass before ended "
                   "in an exception: start the ranks anew from a checkpoint",
                   name);
}

}  // namespace lockstep::data_parallel
