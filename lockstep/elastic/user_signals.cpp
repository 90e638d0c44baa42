#include <lockstep/elastic/user_signals.h>

#include <unistd.h>

#include <stop_token>

namespace lockstep::elastic {

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

}  // namespace lockstep::elastic
