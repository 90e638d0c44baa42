#include <lockstep/train/stop_request.h>

#include <atomic>

namespace lockstep::train {

namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};

// A signal handler may use nothing but lock-free atomics and globals.
std::atomic<int> requested{0};
static_assert(std::atomic<int>::is_always_lock_free);

std::atomic<bool> heeded{false};  // by the outermost StopRequest

// The second signal may be another one, because a launcher goes from SIGINT to SIGTERM when its
// user insists. A signal that is ignored (nohup) stays ignored.
void note(int signal) {
  requested = signal;
  for (const int other : kSignals) {
    struct sigaction now {};
    if (::sigaction(other, nullptr, &now) == 0 && now.sa_handler == note) ::signal(other, SIG_DFL);
  }
}

}  // namespace

StopRequest::StopRequest() : outermost_(!heeded.exchange(true)) {
  if (!outermost_) return;
  requested = 0;
  struct sigaction once {};
  ::sigemptyset(&once.sa_mask);
  once.sa_handler = note;
  once.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &before_[i]);
    if (kSignals[i] == SIGHUP && before_[i].sa_handler == SIG_IGN) continue;
    ::sigaction(kSignals[i], &once, nullptr);
  }
}

StopRequest::~StopRequest() {
  if (!outermost_) return;
  heeded = false;
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

bool StopRequest::made() const { return requested != 0; }

int StopRequest::latest_signal() { return requested; }

}  // namespace lockstep::train
