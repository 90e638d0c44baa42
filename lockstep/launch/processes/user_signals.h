// The signals by which users end a job, pause it (Ctrl-Z), or ask where its ranks are (SIGUSR1).
#pragma once

#include <signal.h>

#include <filesystem>
#include <thread>

namespace lockstep::launch {

// Blocks the signals that end or pause a job in this thread, and so in all threads that it starts,
// so that a signalfd can be read instead. Returns these signals; one that was ignored when the
// process started (nohup) stays ignored. It also makes writes to closed pipes fail rather than end
// the process, and blocks SIGUSR1, which ReportOnSignal waits for.
sigset_t take_over_signals();

// Does what SIGTSTP does by default: this process stops, and the call returns when its user lets it
// go on. Returns at once where there is no shell that could do that.
void stop_until_continued();

// While it lives, one of the signals ends this process at once, or stops it: for waits during which
// there is nothing yet that the guardian would not clear away.
class EndWhileWaiting {
 public:
  explicit EndWhileWaiting(sigset_t signals);

 private:
  std::jthread thread_;
};

// While it lives, `kill -USR1` of the launcher prints where the ranks of this host are, while the
// job goes on. A thread of its own waits for SIGUSR1, asks the ranks for dumps and prints the
// merged report to standard error; this thread, and threads that it starts later, do not get the
// signal. Ranks do not get it either, and may use it for themselves.
class ReportOnSignal {
 public:
  // `directory` is where ranks leave dumps.
  explicit ReportOnSignal(std::filesystem::path directory);
  ~ReportOnSignal();

 private:
  std::jthread thread_;
};

}  // namespace lockstep::launch
