#include <lockstep/comm/executor.h>

#include <lockstep/base/log.h>

namespace lockstep::comm {

namespace {

// Runs what is done about a failure. Whatever goes wrong with that, the failure itself is what
// waiters must hear of, and the thread must go on to tell them.
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
  // Before the job is queued: where no thread can be had, it must not run later after all.
  if (launch == Launch::in_background) start_thread();
  queue_.push_back(job);
  if (launch == Launch::in_background) run_in_background();
}

void Executor::start_thread() {
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
}

// Everything queued before a job has to run first, so the thread takes that along.
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

// Runs the first job of the queue without holding the lock, and lets go of its tensors without it
// as well: whatever their deleters do, nobody is held up.
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
  // A waiter that has less time than the jobs it would have to run must not: it could not stop.
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
  // Whoever runs a job now has been interrupted; it comes back at once where it waits for a peer.
  changed_.wait(lock, [this] { return !running_; });
  running_ = true;
  lock.unlock();
  guarded(meanwhile);
  lock.lock();
  running_ = false;
  changed_.notify_all();
}

}  // namespace lockstep::comm
