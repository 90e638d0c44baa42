#include <cli/torch/relaunch.h>

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/net/fd.h>

namespace lockstep::cli {

bool launched() { return read_launch_environment().launcher != Launcher::none; }

int relaunch(const std::string& verb, Arguments arguments, int num_ranks) {
  namespace fs = std::filesystem;
  const fs::path self = fs::read_symlink("/proc/self/exe");
  std::vector<std::string> words = {
      "lockstep", "run", "--nproc-per-node", std::to_string(num_ranks), self.string(), verb};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // Beside this program in a build tree; two folders up and in bin where installed.
  const fs::path here = self.parent_path();
  for (const fs::path& launcher :
       {here / "lockstep", here.parent_path().parent_path() / "bin/lockstep"})
    ::execv(launcher.c_str(), argv.data());
  throw UsageError(
      "cannot start ranks: the program lockstep is not beside {} ({}). Start this with "
      "'lockstep run --nproc-per-node {} …' instead",
      self.string(), std::strerror(errno), num_ranks);
}

namespace {

volatile pid_t launcher = 0;

// Ctrl-C reaches the launcher too, which ends its ranks; what kill(1) sends reaches us alone.
void pass_on(int signal, siginfo_t* info, void*) {
  if (launcher > 0 && (info->si_code == SI_USER || info->si_code == SI_QUEUE))
    ::kill(launcher, signal);
}

int run_and_wait(const std::string& verb, Arguments arguments, int num_ranks) {
  struct sigaction passing {};
  passing.sa_sigaction = pass_on;
  passing.sa_flags = SA_SIGINFO | SA_RESTART;
  struct sigaction before {};
  ::sigaction(SIGINT, &passing, &before);
  const pid_t self = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw UsageError("no process for lockstep run: {}", std::strerror(errno));
  if (child == 0) {
    ::sigaction(SIGINT, &before, nullptr);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != self) ::_exit(1);
    try {
      relaunch(verb, arguments, num_ranks);
    } catch (const std::exception& error) {
      fmt::print(stderr, "lockstep: {}\n", error.what());
    }
    ::_exit(1);
  }
  launcher = child;
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  launcher = 0;
  ::sigaction(SIGINT, &before, nullptr);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

Reported report_from_ranks(const std::string& verb, std::vector<std::string> arguments,
                           int num_ranks) {
  // Memory that rank 0 opens through this process: no file that could be left behind.
  const net::Fd memory(::memfd_create("lockstep-report", MFD_CLOEXEC));
  if (!memory) throw UsageError("no memory for the ranks' report: {}", std::strerror(errno));
  arguments.insert(arguments.end(),
                   {"--report", fmt::format("/proc/{}/fd/{}", ::getpid(), memory.get())});
  Reported reported;
  reported.exit_code = run_and_wait(verb, arguments, num_ranks);
  if (reported.exit_code != 0) return reported;
  std::ifstream stream(fmt::format("/proc/self/fd/{}", memory.get()));
  reported.text.assign(std::istreambuf_iterator<char>(stream), {});
  return reported;
}

}  // namespace lockstep::cli
