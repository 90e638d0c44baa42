#include <cli/torch/check_with_ranks.h>

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/net/fd.h>

#include <cli/torch/relaunch.h>

namespace lockstep::cli::inspection {

namespace {

int run_and_wait(int num_ranks, Arguments arguments) {
  // Ctrl-C reaches the launcher too, which ends its ranks.
  const auto before = ::signal(SIGINT, SIG_IGN);
  const pid_t self = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw UsageError("no process for lockstep run: {}", std::strerror(errno));
  if (child == 0) {
    ::signal(SIGINT, before);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != self) ::_exit(1);
    try {
      relaunch("check", arguments, num_ranks);
    } catch (const std::exception& error) {
      fmt::print(stderr, "lockstep: {}\n", error.what());
    }
    ::_exit(1);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  ::signal(SIGINT, before);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

Relaunched check_with_ranks(int num_ranks, const std::string& backend) {
  // Memory that rank 0 opens through this process: no file that could be left behind.
  const net::Fd memory(::memfd_create("lockstep-check", MFD_CLOEXEC));
  if (!memory) throw UsageError("no memory for the ranks' report: {}", std::strerror(errno));
  const std::vector<std::string> arguments = {
      "--backend", backend, "--report", fmt::format("/proc/{}/fd/{}", ::getpid(), memory.get())};
  Relaunched result;
  result.exit_code = run_and_wait(num_ranks, arguments);
  if (result.exit_code != 0) return result;
  std::ifstream stream(fmt::format("/proc/self/fd/{}", memory.get()));
  nlohmann::json::parse(stream).get_to(result.report);
  return result;
}

}  // namespace lockstep::cli::inspection
