// The signals by which users end a job.
#pragma once

#include <signal.h>

#include <thread>

namespace lockstep::elastic {

// Blocks them in this thread, and so in all that it starts, for a signalfd to be read instead; also
// has writes to closed pipes fail rather than end the process, and blocks SIGUSR1, which
// ReportOnSignal waits for. Returns which they are: those that
// whoever started the process ignores (nohup) stay so.
sigset_t take_over_signals();

// While it lives, one of the signals ends this process at once: for waits during which there is
// nothing yet that the guardian would not clear away.
class EndWhileWaiting {
 public:
  explicit EndWhileWaiting(sigset_t signals);

 private:
  std::jthread thread_;
};

}  // namespace lockstep::elastic
