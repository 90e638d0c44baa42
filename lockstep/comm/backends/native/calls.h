// The calls of one group over our transports: Executor runs them, Staging copies the tensors of a
// device to the host and back, and callers wait for a TransportCall.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/call.h>
#include <lockstep/flight/recorder.h>

namespace lockstep::comm::backends {

// One call: the work to run, and whether it is done or has failed.
class Job {
 public:
  explicit Job(Deadline deadline) : deadline_(deadline) {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

 private:
  friend class Executor;

  // Does the work. Any exception may be thrown.
  virtual void run() = 0;
  // Releases the job's resources. Called once, whether the job ran or not, before any waiter hears
  // that it is done.
  virtual void let_go() noexcept = 0;

  Deadline deadline_;
  bool done_ = false;
  std::exception_ptr error_;
};

// Runs the calls of one group, one at a time and in order, in a thread of its own or in the thread
// that waits for them, whichever comes first. Thread-safe. After a job has thrown, all later ones
// fail with the same error without being run.
class Executor {
 public:
  // `on_failure` is called once, in the thread that ran the failing job, before any waiter hears of
  // the failure. `on_waited`, if given, is told how long each wait took that was not over at once;
  // it must not call back.
  explicit Executor(std::function<void(std::exception_ptr)> on_failure,
                    std::function<void(Clock::duration)> on_waited = nullptr);
  ~Executor();

  // Runs the jobs that are still queued and ends the thread; nothing may be submitted afterwards.
  void finish();

  void submit(const std::shared_ptr<Job>& job, Launch launch);

  bool done(const Job& job) const;
  // Whether nothing is queued, and nothing runs.
  bool idle() const;

  // Throws the job's exception. Returns false at the deadline.
  bool wait(Job& job, Deadline deadline);

  // Fails the jobs in the queue and all later ones; the job that runs now is not interrupted.
  // `meanwhile` runs while no job does.
  void fail(std::exception_ptr error, const std::function<void()>& meanwhile);

 private:
  void start_thread();
  void run_in_background();
  void work();
  void run_next(std::unique_lock<std::mutex>& lock);
  bool wait_until_done(Job& job, Deadline deadline, std::unique_lock<std::mutex>& lock);

  std::function<void(std::exception_ptr)> on_failure_;
  std::function<void(Clock::duration)> on_waited_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::exception_ptr failure_;
  bool running_ = false;   // some thread runs a job
  int in_background_ = 0;  // queued jobs that the thread should run
  bool stopping_ = false;
  std::thread thread_;  // started by the first job that needs it
};

// Tensors on a device are copied to the host, because our transports reach nothing else; that is
// also how several ranks share one GPU. These are the streams on which the calls of one group copy,
// one for each device. Results arrive in the order of the calls: a thread that has waited for one
// call has the results of all earlier ones, too. Thread-safe.
class StagingStreams {
 public:
  c10::Stream on(c10::Device device);

 private:
  std::mutex mutex_;
  std::vector<c10::Stream> streams_;
};

// Copies one call's tensors from the device to the host and back, beside the caller's stream. Made
// in the caller's thread, used in the thread that runs the call.
class Staging {
 public:
  // Remembers the point in the current stream after which the tensors hold their values.
  explicit Staging(c10::Stream side);
  ~Staging();

  // Waits for that point, then copies.
  at::Tensor to_host(const at::Tensor& tensor);
  // Memory for a result, with the tensor's shape.
  at::Tensor host_like(const at::Tensor& tensor);
  // Enqueues the copy back, or a copy on the device; call finish() after the last one.
  void to_device(const at::Tensor& from, const at::Tensor& tensor);
  void finish();

  // To be used after finish(): order_current_stream() orders the current stream after the copies,
  // arrived() says whether they are over.
  void order_current_stream();
  bool arrived() const;

 private:
  void keep_for_side_stream(const at::Tensor& tensor);

  struct State;
  std::unique_ptr<State> state_;
};

// Runs calls; a communicator implements it.
class CallRunner {
 public:
  // `staging` is null if the tensors are on the CPU. Throws the call's failure.
  virtual void run_call(const Call& call, Staging* staging) = 0;

 protected:
  ~CallRunner() = default;
};

// A call that the executor runs and the caller waits for. It is one object for both, because a
// small call costs little more than making it. Thread-safe.
class TransportCall final : public Job, public PendingCall {
 public:
  // `runner` has to live until the executor is done with the call, not only until the caller has
  // waited.
  TransportCall(CallRunner& runner, std::shared_ptr<Executor> executor,
                std::shared_ptr<flight::Recorder> recorder, Call call,
                std::unique_ptr<Staging> staging);

  bool done() const override;
  bool ready() const override;
  void wait() override;
  void wait_on_host(Deadline deadline) override;

 private:
  void run() override { runner_.run_call(call_, staging_.get()); }
  void let_go() noexcept override;
  bool arrived() const { return !staging_ || staging_->arrived(); }
  void wait_for_job(Deadline deadline);
  [[noreturn]] void give_up(Deadline deadline) const;

  CallRunner& runner_;
  std::shared_ptr<Executor> executor_;
  std::shared_ptr<flight::Recorder> recorder_;
  Call call_;
  std::unique_ptr<Staging> staging_;
};

}  // namespace lockstep::comm::backends
