// The signals by which users end a job, or have it stand still for a while (Ctrl-Z).
#pragma once

#include <signal.h>

#include <thread>

namespace lockstep::elastic {

// Blocks them in this thread, and so in all that it starts, for a signalfd to be read instead; also
// has writes to closed pipes fail rather than end the process, and blocks SIGUSR1, which
// ReportOnSignal waits for. Returns which they are: those that
// whoever started the process ignores (nohup) stay so.
sigset_t take_over_signals();

// Does what SIGTSTP does where nobody has taken it over: this process stands still, and the call
// returns when its user lets it go on. Returns at once where there is no shell that could do that.
void stop_until_continued();

// While it lives, one of the signals ends this process at once, or has it stand still: for waits
// during which there is nothing yet that the guardian would not clear away.
class EndWhileWaiting {
 public:
  explicit EndWhileWaiting(sigset_t signals);

 private:
  std::jthread thread_;
};

}  // namespace lockstep::elastic
