#include <lockstep/comm/transport_call.h>

#include <optional>
#include <thread>

#include <lockstep/base/error.h>

namespace lockstep::comm {

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
  // Who stops waiting before the call must end is not blocked: it may do something else then. Alone
  // nobody waits for anyone.
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

}  // namespace lockstep::comm
