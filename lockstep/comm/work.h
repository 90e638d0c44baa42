// A call in flight.
#pragma once

#include <memory>

#include <lockstep/base/deadline.h>

namespace lockstep::comm {

// What a backend implements for its calls. Thread-safe.
class PendingCall {
 public:
  virtual ~PendingCall() = default;

  // True once it has finished or failed; never blocks.
  virtual bool done() const = 0;

  // True once wait() would not block this thread; never blocks.
  virtual bool ready() const { return done(); }

  // Blocks until it has finished; throws what it failed with, or CommError (timeout) at the
  // deadline or at the call's own, whichever comes first. At the waiter's deadline the call goes on
  // (shm, tcp, nccl) or, where the engine cannot leave it (gloo, mpi), ends with its group.
  virtual void wait_on_host(Deadline deadline) = 0;

  // Makes the current stream wait for the result without blocking the host where the backend can.
  virtual void wait() = 0;
};

// A handle to a call; copies refer to the same call. Dropping it neither cancels nor waits: the
// tensors stay alive until the call is over, and a failure is thrown by whichever of the group's
// calls is waited for next.
class Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<PendingCall> call) : call_(std::move(call)) {}

  bool done() const { return call_ == nullptr || call_->done(); }

  // Whether wait() would return at once: on a device that is before the result is there.
  bool ready() const { return call_ == nullptr || call_->ready(); }

  // Orders the current stream after the call: what is enqueued on it later sees the result. On CPU,
  // where there is no stream, it blocks until the result is there.
  void wait() {
    if (call_) call_->wait();
  }

  // Blocks this thread until the result is in memory.
  void wait_on_host() { wait_on_host(Deadline::never()); }
  void wait_on_host(Deadline deadline) {
    if (call_) call_->wait_on_host(deadline);
  }

 private:
  std::shared_ptr<PendingCall> call_;
};

}  // namespace lockstep::comm
