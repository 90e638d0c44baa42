#include <lockstep/multi_node/launch_in_child.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <lockstep/base/error.h>
#include <lockstep/net/fd.h>

namespace lockstep {

namespace {

constexpr std::array kEnding = {SIGINT, SIGTERM, SIGQUIT, SIGHUP};
constexpr char kUsage = 'u';
constexpr char kOther = 'o';

volatile pid_t launching = 0;

// A terminal's reach the launcher, too; those of kill(1) reach this process alone.
void pass_on(int signal, siginfo_t* info, void*) {
  const int error = errno;
  if (launching > 0 &&
      (info->si_code == SI_USER || info->si_code == SI_QUEUE || info->si_code == SI_TKILL))
    ::kill(launching, signal);
  errno = error;
}

// For as long as it lives; signals that were ignored stay so.
class PassSignalsOn {
 public:
  PassSignalsOn() {
    struct sigaction passing {};
    passing.sa_sigaction = pass_on;
    passing.sa_flags = SA_SIGINFO | SA_RESTART;
    for (std::size_t i = 0; i < kEnding.size(); ++i) {
      ::sigaction(kEnding[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kEnding[i], &passing, nullptr);
    }
  }
  ~PassSignalsOn() { put_back(); }

  void put_back() const {
    for (std::size_t i = 0; i < kEnding.size(); ++i) ::sigaction(kEnding[i], &before_[i], nullptr);
  }

 private:
  std::array<struct sigaction, kEnding.size()> before_{};
};

void tell(int fd, char kind, const char* what) {
  const std::string text = kind + std::string(what);
  [[maybe_unused]] const auto written = ::write(fd, text.data(), text.size());
}

[[noreturn]] void be_the_launcher(const launch::LaunchOptions& options, int tell_fd) {
  int code = 1;
  try {
    code = launch::launch(options);
  } catch (const UsageError& error) {
    tell(tell_fd, kUsage, error.what());
  } catch (const std::exception& error) {
    tell(tell_fd, kOther, error.what());
  }
  // Nothing of the program that it was forked from is this process's to end.
  ::_exit(code);
}

// Of one that has ended.
std::string told(int fd) {
  std::string text;
  std::array<char, 4096> piece;
  for (ssize_t size; (size = ::read(fd, piece.data(), piece.size())) > 0;)
    text.append(piece.data(), static_cast<std::size_t>(size));
  return text;
}

}  // namespace

int launch_in_child(const launch::LaunchOptions& options) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw UsageError("no pipe for a launcher: {}", std::strerror(errno));
  const net::Fd hear(ends[0]);
  const net::Fd say(ends[1]);
  // What is in the streams' buffers would be written twice.
  std::fflush(nullptr);
  const pid_t self = ::getpid();
  const PassSignalsOn signals;
  // One that comes before the launcher is there waits until it can be passed on.
  sigset_t ending, before;
  ::sigemptyset(&ending);
  for (const int signal : kEnding) ::sigaddset(&ending, signal);
  ::pthread_sigmask(SIG_BLOCK, &ending, &before);
  const pid_t child = ::fork();
  if (child == 0) {
    signals.put_back();
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != self) ::_exit(1);
    be_the_launcher(options, say.get());
  }
  launching = child;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child < 0) throw UsageError("no process for a launcher: {}", std::strerror(errno));
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  launching = 0;
  const std::string text = told(hear.get());
  if (!text.empty() && text.front() == kUsage) throw UsageError(text.substr(1));
  if (!text.empty()) throw Error(text.substr(1));
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace lockstep
