#include <lockstep/train/stop_request.h>

#include <atomic>
#include <initializer_list>

namespace lockstep::train {

namespace {

// A signal handler can reach nothing else.
std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// The second signal may be the other one: a launcher whose user insists goes from SIGINT to
// SIGTERM.
void note(int) {
  requested = true;
  for (const int signal : {SIGINT, SIGTERM}) ::signal(signal, SIG_DFL);
}

}  // namespace

StopRequest::StopRequest() {
  requested = false;
  struct sigaction once {};
  ::sigemptyset(&once.sa_mask);
  once.sa_handler = note;
  once.sa_flags = SA_RESTART;
  ::sigaction(SIGINT, &once, &interrupt_before_);
  ::sigaction(SIGTERM, &once, &terminate_before_);
}

StopRequest::~StopRequest() {
  ::sigaction(SIGINT, &interrupt_before_, nullptr);
  ::sigaction(SIGTERM, &terminate_before_, nullptr);
}

bool StopRequest::made() const { return requested; }

}  // namespace lockstep::train
