#include <lockstep/multi_node/multi_node_training_manager.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <sstream>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/launch.h>
#include <lockstep/launch/processes/rank_setup.h>
#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>
#include <lockstep/recovery/keep_going.h>

namespace lockstep {

namespace {

constexpr int kMostOfEach = 1 << 16;

std::string plural(int number, const char* what) {
  return fmt::format("{} {}{}", number, what, number == 1 ? "" : "s");
}

std::vector<net::Address> endpoints_of(const MultiNodeOptions& options) {
  std::vector<net::Address> endpoints;
  std::istringstream entries(options.endpoint);
  for (std::string entry; std::getline(entries, entry, ',');) {
    endpoints.push_back(net::Address::parse(entry, 0, "MultiNodeOptions::endpoint"));
    if (endpoints.back().port == 0)
      throw UsageError("MultiNodeOptions::endpoint is '{}': hosts need a port that all of them "
                       "know, as in {}:29400",
                       options.endpoint, endpoints.back().host);
  }
  return endpoints;
}

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

// The text that a process which has ended left in its pipe.
std::string told(int fd) {
  std::string text;
  std::array<char, 4096> piece;
  for (ssize_t size; (size = ::read(fd, piece.data(), piece.size())) > 0;)
    text.append(piece.data(), static_cast<std::size_t>(size));
  return text;
}

// A launcher takes over its process, which must have one thread: libraries that LibTorch loads
// start some before main(). So it has a process of its own here. This one waits for it, passes on
// the signals that would end it, and throws what the launcher throws, as a UsageError or an Error.
int launch_in_child(const launch::LaunchOptions& options) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw UsageError("no pipe for a launcher: {}", std::strerror(errno));
  const net::Fd hear(ends[0]);
  const net::Fd say(ends[1]);
  // Otherwise both processes would write what is in the streams' buffers.
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

}  // namespace

MultiNodeTrainingManager::MultiNodeTrainingManager(MultiNodeOptions options)
    : options_(std::move(options)) {}

void MultiNodeTrainingManager::setup(int num_nodes, int gpus_per_node) {
  if (num_nodes < 1 || num_nodes > kMostOfEach || gpus_per_node < 1 || gpus_per_node > kMostOfEach)
    throw UsageError("setup({}, {}): a job has 1 to {} hosts, with 1 to {} ranks each", num_nodes,
                     gpus_per_node, kMostOfEach, kMostOfEach);
  const int least = options_.min_nodes.value_or(num_nodes);
  if (least < 1 || least > num_nodes)
    throw UsageError("MultiNodeOptions::min_nodes is {}, and setup({}, {}) says how many there are "
                     "at most: give 1 to {}",
                     least, num_nodes, gpus_per_node, num_nodes);
  if (options_.node_rank && (*options_.node_rank < 0 || *options_.node_rank >= num_nodes))
    throw UsageError("MultiNodeOptions::node_rank is {}, and nodes are numbered from 0 to {}",
                     *options_.node_rank, num_nodes - 1);
  if (options_.max_restarts < 0)
    throw UsageError("MultiNodeOptions::max_restarts is {}: give 0 or more", options_.max_restarts);
  if (options_.spares < 0 || options_.spares > kMostOfEach ||
      (options_.spares > 0 && options_.max_restarts == 0))
    throw UsageError("MultiNodeOptions::spares is {}: give 0 or more, and max_restarts too, which "
                     "they are for",
                     options_.spares);
  const auto endpoints = endpoints_of(options_);
  if (num_nodes > 1 && (endpoints.empty() || options_.secret_file.empty()))
    throw UsageError("setup({}, {}): several hosts need {}, the same on all of them", num_nodes,
                     gpus_per_node,
                     endpoints.empty() ? "MultiNodeOptions::endpoint (HOST:PORT, an address of one "
                                         "of them)"
                                       : "MultiNodeOptions::secret_file (that only its owner can "
                                         "read: chmod 600)");
  if (const LaunchEnvironment job = read_launch_environment(); is_rank() && !job.spare) {
    if (job.local_world_size != gpus_per_node || job.num_nodes < least || job.num_nodes > num_nodes)
      throw UsageError("setup({}, {}): this process is a rank that {} started, on {} with {} each: "
                       "start it with as many, or give setup() those",
                       num_nodes, gpus_per_node, launcher_name(job.launcher),
                       plural(job.num_nodes, "host"), plural(job.local_world_size, "rank"));
  }
  num_nodes_ = num_nodes;
  gpus_per_node_ = gpus_per_node;
}

void MultiNodeTrainingManager::check_set_up() const {
  if (num_nodes_ == 0)
    throw UsageError("how many hosts and ranks the job has is not said: call setup(num_nodes, "
                     "gpus_per_node) first");
}

bool MultiNodeTrainingManager::is_rank() const {
  return read_launch_environment().launcher != Launcher::none;
}

std::string MultiNodeTrainingManager::description() const {
  check_set_up();
  const int least = min_nodes();
  return fmt::format(
      "{}{} of {}{}; {}", least < num_nodes_ ? fmt::format("{} to ", least) : "",
      plural(num_nodes_, "host"), plural(gpus_per_node_, "rank"),
      num_nodes_ == 1 ? "" : fmt::format(" each, which meet at {}", options_.endpoint),
      plural(options_.max_restarts, "restart"));
}

DistributedManager MultiNodeTrainingManager::join() const {
  check_set_up();
  if (!is_rank())
    throw UsageError("join() is for the ranks of a job, and this process is none: run() or "
                     "launch() starts them");
  return setup_distributed(options_.distributed);
}

int MultiNodeTrainingManager::launch(const std::vector<std::string>& program) const {
  check_set_up();
  if (is_rank())
    throw UsageError("launch() is for hosts, and this process is already a rank, started by {}",
                     launcher_name(read_launch_environment().launcher));
  const int num_gpus = launch::num_visible_gpus();
  if (num_gpus > 0 && num_gpus < gpus_per_node_)
    throw UsageError("setup({}, {}): this host has {} (counted in /dev/nvidia*, limited by "
                     "CUDA_VISIBLE_DEVICES): ask for no more, or hide them all to train on the CPU "
                     "(CUDA_VISIBLE_DEVICES=\"\")",
                     num_nodes_, gpus_per_node_, plural(num_gpus, "GPU"));
  launch::LaunchOptions launched;
  launched.program = program;
  launched.program_kind = launch::ProgramKind::executable;
  launched.num_local_ranks = gpus_per_node_;
  launched.min_nodes = min_nodes();
  launched.max_nodes = num_nodes_;
  launched.node_rank = options_.node_rank;
  if (num_nodes_ > 1) launched.endpoints = endpoints_of(options_);
  launched.run_id = options_.run_id;
  launched.secret_file = options_.secret_file;
  launched.timeout = options_.timeout;
  launched.last_call = options_.last_call;
  launched.max_restarts = options_.max_restarts;
  launched.num_spares = options_.spares;
  launched.stuck_after = options_.stuck_after;
  launched.interrupt_grace = options_.interrupt_grace;
  return launch_in_child(launched);
}

int MultiNodeTrainingManager::run(int argc, const char* const* argv,
                                  const std::function<int(DistributedManager)>& train) const {
  if (is_rank()) {
    int code = 0;
    keep_going([&] { code = train(join()); });
    return code;
  }
  std::vector<std::string> program = {std::filesystem::read_symlink("/proc/self/exe").string()};
  program.insert(program.end(), argv + std::min(argc, 1), argv + argc);
  return launch(program);
}

}  // namespace lockstep
