// A call over our own transports, from when it is made until its result is there.
#pragma once

#include <memory>

#include <lockstep/comm/call.h>
#include <lockstep/comm/executor.h>
#include <lockstep/comm/staging.h>
#include <lockstep/comm/work.h>
#include <lockstep/flight/recorder.h>

namespace lockstep::comm {

// Who knows how to run a call; its communicator.
class CallRunner {
 public:
  // `staging` is null where the tensors are on the CPU. Throws what the call fails with.
  virtual void run_call(const Call& call, Staging* staging) = 0;

 protected:
  ~CallRunner() = default;
};

// What the executor runs and what the caller waits for: one object, as small calls are made of
// little else. Thread-safe.
class TransportCall final : public Job, public PendingCall {
 public:
  // `runner` has to be there until the executor is done with the call, not until it is waited for.
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

}  // namespace lockstep::comm
