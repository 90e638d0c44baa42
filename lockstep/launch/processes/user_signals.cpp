#include <lockstep/launch/processes/user_signals.h>

#include <signal.h>
#include <unistd.h>

#include <stop_token>
#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/flight/report.h>
#include <lockstep/launch/processes/output.h>

namespace lockstep::launch {

sigset_t take_over_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGHUP, SIGTSTP}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN)
      ::sigaddset(&signals, signal);
  }
  sigset_t blocked = signals;
  ::sigaddset(&blocked, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  return signals;
}

void stop_until_continued() {
  sigset_t stop, before;
  ::sigemptyset(&stop);
  ::sigaddset(&stop, SIGTSTP);
  ::pthread_sigmask(SIG_UNBLOCK, &stop, &before);
  ::raise(SIGTSTP);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

EndWhileWaiting::EndWhileWaiting(sigset_t signals)
    : thread_([signals](const std::stop_token& stop) {
        while (!stop.stop_requested()) {
          const timespec slice{0, 50'000'000};
          const int signal = ::sigtimedwait(&signals, nullptr, &slice);
          if (signal == SIGTSTP)
            stop_until_continued();
          else if (signal > 0)
            ::_exit(128 + signal);
        }
      }) {}

namespace {

// Ranks that can answer do so much faster.
constexpr milliseconds kLongestAnswer{3000};

std::string report_now(const std::filesystem::path& directory) {
  try {
    const flight::Evidence evidence = flight::demand_evidence(directory, kLongestAnswer);
    if (evidence.dumps.empty())
      return "lockstep: no rank of this host has made a group that could be asked\n";
    return fmt::format("lockstep: where the ranks of this host are:\n{}",
                       flight::merged_report(evidence));
  } catch (const std::exception& error) {
    return fmt::format("lockstep: {}\n", error.what());
  }
}

void print(const std::string& text) {
  Sink sink(STDERR_FILENO);
  sink.append(text);
  sink.flush(Deadline::after(milliseconds(1000)));
}

}  // namespace

ReportOnSignal::ReportOnSignal(std::filesystem::path directory) {
  sigset_t asked;
  ::sigemptyset(&asked);
  ::sigaddset(&asked, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &asked, nullptr);
  thread_ = std::jthread([asked, directory = std::move(directory)](const std::stop_token& stop) {
    int signal = 0;
    while (::sigwait(&asked, &signal) == 0 && !stop.stop_requested()) print(report_now(directory));
  });
}

ReportOnSignal::~ReportOnSignal() {
  thread_.request_stop();
  ::pthread_kill(thread_.native_handle(), SIGUSR1);
}

}  // namespace lockstep::launch
