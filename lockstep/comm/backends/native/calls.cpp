#include <lockstep/comm/backends/native/calls.h>

#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/device/backward_thread.h>

namespace lockstep::comm::backends {

namespace {

// Runs a step of handling a failure. An exception from the step is dropped: waiters must hear of
// the failure itself, and the thread must go on to tell them.
template <typename Step>
void guarded(const Step& step) {
  try {
    step();
  } catch (const std::exception& error) {
    log::warn("while a failed group was ended: {}", error.what());
  } catch (...) {
    log::warn("while a failed group was ended: something was thrown that is no std::exception");
  }
}

}  // namespace

Executor::Executor(std::function<void(std::exception_ptr)> on_failure,
                   std::function<void(Clock::duration)> on_waited)
    : on_failure_(std::move(on_failure)), on_waited_(std::move(on_waited)) {}

Executor::~Executor() { finish(); }

void Executor::finish() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    while (!queue_.empty() || running_) {
      if (running_) {
        changed_.wait(lock);
      } else {
        run_next(lock);
      }
    }
  }
  if (thread_.joinable()) thread_.join();
}

void Executor::submit(const std::shared_ptr<Job>& job, Launch launch) {
  const std::lock_guard lock(mutex_);
  // The thread is started before the job is queued: if no thread can be started, the job must not
  // run later after all.
  if (launch == Launch::in_background) start_thread();
  queue_.push_back(job);
  if (launch == Launch::in_background) run_in_background();
}

void Executor::start_thread() {
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
}

// Everything queued before a job has to run first, so the thread runs that, too.
void Executor::run_in_background() {
  in_background_ = static_cast<int>(queue_.size());
  changed_.notify_all();
}

void Executor::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || (in_background_ > 0 && !running_); });
    if (stopping_) return;
    if (!queue_.empty()) run_next(lock);
  }
}

// Runs the first job of the queue and releases its tensors, both without holding the lock, so that
// their deleters hold nobody up.
void Executor::run_next(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Job> job = queue_.front();
  running_ = true;
  std::exception_ptr error = failure_;
  lock.unlock();
  if (!error) {
    try {
      job->run();
    } catch (...) {
      error = std::current_exception();
      guarded([&] { on_failure_(error); });
    }
  }
  job->let_go();
  lock.lock();
  if (error && !failure_) failure_ = error;
  job->error_ = error;
  job->done_ = true;
  queue_.pop_front();
  if (in_background_ > 0) --in_background_;
  running_ = false;
  changed_.notify_all();
}

bool Executor::done(const Job& job) const {
  const std::lock_guard lock(mutex_);
  return job.done_;
}

bool Executor::idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !running_;
}

bool Executor::wait(Job& job, Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (!job.done_) {
    const auto begin = on_waited_ ? Clock::now() : Clock::time_point();
    const bool done = wait_until_done(job, deadline, lock);
    if (on_waited_) on_waited_(Clock::now() - begin);
    if (!done) return false;
  }
  if (job.error_) std::rethrow_exception(job.error_);
  return true;
}

bool Executor::wait_until_done(Job& job, Deadline deadline, std::unique_lock<std::mutex>& lock) {
  // A waiter with less time than the jobs before its own may take must not run them: it could not
  // stop.
  bool may_run = true;
  for (const auto& before : queue_) {
    may_run = may_run && deadline.at() >= before->deadline_.at();
    if (before.get() == &job) break;
  }
  while (!job.done_) {
    if (!running_ && may_run) {
      run_next(lock);
      continue;
    }
    if (!may_run && in_background_ == 0) {
      start_thread();
      run_in_background();
    }
    if (changed_.wait_until(lock, deadline.at()) == std::cv_status::timeout && !job.done_)
      return false;
  }
  return true;
}

void Executor::fail(std::exception_ptr error, const std::function<void()>& meanwhile) {
  std::unique_lock lock(mutex_);
  if (failure_) return;
  failure_ = std::move(error);
  // The job that runs now has been interrupted; it returns at once if it waits for a peer.
  changed_.wait(lock, [this] { return !running_; });
  running_ = true;
  lock.unlock();
  guarded(meanwhile);
  lock.lock();
  running_ = false;
  changed_.notify_all();
}

c10::Stream StagingStreams::on(c10::Device device) {
  const std::lock_guard lock(mutex_);
  for (const c10::Stream& stream : streams_)
    if (stream.device() == device) return stream;
  streams_.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  return streams_.back();
}

struct Staging::State {
  explicit State(c10::Stream side)
      : guard(side.device_type()),
        side(side),
        ready(side.device_type()),
        done(side.device_type()) {}

  c10::impl::VirtualGuardImpl guard;
  c10::Stream side;
  c10::Event ready;
  c10::Event done;
};

Staging::Staging(c10::Stream side) : state_(std::make_unique<State>(side)) {
  state_->ready.record(state_->guard.getStream(side.device()));
}

Staging::~Staging() = default;

at::Tensor Staging::host_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options()
                                       .device(c10::DeviceType::CPU)
                                       .requires_grad(false)
                                       .pinned_memory(tensor.is_cuda()));
}

at::Tensor Staging::to_host(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const c10::StreamGuard stream(state_->side);
  state_->ready.block(state_->side);
  at::Tensor host = host_like(tensor);
  host.copy_(tensor);  // blocks until the bytes are here
  keep_for_side_stream(tensor);
  return host;
}

void Staging::to_device(const at::Tensor& from, const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const c10::StreamGuard stream(state_->side);
  // Work that the caller has enqueued on the tensor must not overtake the result.
  state_->ready.block(state_->side);
  tensor.copy_(from, /*non_blocking=*/true);
  keep_for_side_stream(tensor);
  if (!from.is_cpu()) keep_for_side_stream(from);
}

// The caller may release a tensor while the side stream still works on it: its memory must not be
// given to someone else before.
void Staging::keep_for_side_stream(const at::Tensor& tensor) {
  state_->guard.recordDataPtrOnStream(tensor.storage().data_ptr(), state_->side);
}

void Staging::finish() { state_->done.record(state_->side); }

void Staging::order_current_stream() {
  state_->done.block(state_->guard.getStream(state_->side.device()));
}

bool Staging::arrived() const { return state_->done.query(); }

TransportCall::TransportCall(CallRunner& runner, std::shared_ptr<Executor> executor,
                             std::shared_ptr<flight::Recorder> recorder, Call call,
                             std::unique_ptr<Staging> staging)
    : Job(call.deadline),
      runner_(runner),
      executor_(std::move(executor)),
      recorder_(std::move(recorder)),
      call_(std::move(call)),
      staging_(std::move(staging)) {}

void TransportCall::let_go() noexcept {
  call_.inputs.clear();
  call_.outputs.clear();
  call_.transfers.clear();
}

bool TransportCall::done() const { return executor_->done(*this) && arrived(); }

bool TransportCall::ready() const { return executor_->done(*this); }

void TransportCall::wait() {
  wait_for_job(Deadline::never());
  if (staging_) staging_->order_current_stream();
}

void TransportCall::wait_on_host(Deadline deadline) {
  wait_for_job(deadline);
  while (!arrived()) {
    if (deadline.passed()) give_up(deadline);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void TransportCall::wait_for_job(Deadline deadline) {
  // A thread whose own deadline comes before the call's is not blocked by this call: it may do
  // something else then. In a group of one nobody waits for anyone.
  const device::AsBackwardThread caller;
  std::optional<flight::Recorder::Block> block;
  if (recorder_->global_ranks().size() > 1 && deadline.at() >= call_.deadline.at() &&
      !executor_->done(*this))
    block.emplace(*recorder_, call_.flight_entry);
  if (!executor_->wait(*this, deadline)) give_up(deadline);
}

void TransportCall::give_up(Deadline deadline) const {
  throw CommError({.fault = Fault::timeout,
                   .operation = name(call_.fingerprint.operation),
                   .group = recorder_->group(),
                   .sequence = call_.fingerprint.sequence,
                   .explanation = fmt::format("It was not done when the waiter's {:.1f} s were "
                                              "over; it goes on.",
                                              deadline.span_seconds())});
}

}  // namespace lockstep::comm::backends
