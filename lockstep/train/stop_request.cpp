#include <lockstep/train/stop_request.h>

#include <atomic>

namespace lockstep::train {

namespace {

// A signal handler can reach nothing else.
std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void note(int) { requested = true; }

}  // namespace

StopRequest::StopRequest() {
  requested = false;
  struct sigaction once {};
  once.sa_handler = note;
  once.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  ::sigaction(SIGINT, &once, &interrupt_before_);
  ::sigaction(SIGTERM, &once, &terminate_before_);
}

StopRequest::~StopRequest() {
  ::sigaction(SIGINT, &interrupt_before_, nullptr);
  ::sigaction(SIGTERM, &terminate_before_, nullptr);
}

bool StopRequest::made() const { return requested; }

}  // namespace lockstep::train
