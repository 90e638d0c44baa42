#include <lockstep/elastic/guardian_process.h>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/elastic/cpu_set.h>
#include <lockstep/elastic/descendants.h>
#include <lockstep/elastic/flight_directory.h>

namespace lockstep::elastic {

namespace {

constexpr std::size_t kLargestPacket = 256 << 10;

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) all.push_back(word.data());
  all.push_back(nullptr);
  return all;
}

// The launcher's environment with `changes` over it.
std::vector<std::string> merged_environment(const std::vector<std::string>& changes) {
  std::vector<std::string> merged = changes;
  const auto name = [](std::string_view entry) { return entry.substr(0, entry.find('=')); };
  for (std::string& inherited : whole_environment()) {
    bool changed = false;
    for (const std::string& change : changes) changed |= name(change) == name(inherited);
    if (!changed) merged.push_back(std::move(inherited));
  }
  return merged;
}

// All that the child of a vfork needs, made ready beforehand: it shares our memory and may only
// make system calls. What fails in it comes back through a pipe that a successful exec closes, and
// not through that memory: the thread sanitizer turns vfork into fork.
struct Start {
  char* const* command;
  char* const* environment;
  int standard_input;  // -1: inherited
  int standard_output;
  int standard_error;
  int line;
  const CpuSet* cpus;  // or null
  pid_t guardian;
  int failure;  // takes the errno of what failed in the child
};

[[noreturn]] void become_rank(const Start& start) {
  const auto require = [&start](bool succeeded) {
    if (succeeded) return;
    const int error = errno;
    if (::write(start.failure, &error, sizeof(error)) < 0) ::_exit(126);
    ::_exit(127);
  };
  require(::setpgid(0, 0) == 0);
  require(::prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
  if (::getppid() != start.guardian) ::_exit(127);  // it died before the line above
  // Pinning is a matter of speed: a rank that may not be pinned runs all the same.
  if (start.cpus != nullptr) ::sched_setaffinity(0, start.cpus->bytes, start.cpus->set);
  if (start.standard_input >= 0) require(::dup2(start.standard_input, STDIN_FILENO) >= 0);
  require(::dup2(start.standard_output, STDOUT_FILENO) >= 0);
  require(::dup2(start.standard_error, STDERR_FILENO) >= 0);
  require(::fcntl(start.line, F_SETFD, 0) == 0);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execve(start.command[0], start.command, start.environment);
  require(false);
  ::_exit(127);
}

}  // namespace

GuardianProcess::GuardianProcess(GuardianSetup setup, net::Fd channel)
    : setup_(std::move(setup)),
      channel_(std::move(channel)),
      pids_(static_cast<std::size_t>(setup_.num_slots), 0) {}

void GuardianProcess::run() {
  try {
    ::prctl(PR_SET_NAME, "lockstep-guard");
    // A session of its own: neither Ctrl-C nor a kill of the launcher's group reaches it. Every
    // signal that can wait, waits for ever: it leaves when the launcher says so or vanishes.
    ::setsid();
    sigset_t all;
    ::sigfillset(&all);
    ::sigprocmask(SIG_SETMASK, &all, nullptr);
    ::signal(SIGCHLD, SIG_DFL);
    sigset_t child;
    ::sigemptyset(&child);
    ::sigaddset(&child, SIGCHLD);
    children_ = net::Fd(::signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK));
    adopt_orphans();

    while (true) {
      pollfd ready[2] = {{channel_.get(), POLLIN, 0}, {children_.get(), POLLIN, 0}};
      if (::poll(ready, 2, -1) < 0 && errno != EINTR) leave();
      if (ready[1].revents != 0) reap();
      if (ready[0].revents != 0 && !listen()) leave();
    }
  } catch (...) {
    leave();
  }
}

bool GuardianProcess::listen() {
  std::string packet(kLargestPacket, '\0');
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kRankDescriptors * sizeof(int))> control{};
  iovec payload{packet.data(), packet.size()};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(channel_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return true;
  if (got <= 0) return false;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr) {
    GuardianCommand command;
    if (got != sizeof(command)) return false;
    std::memcpy(&command, packet.data(), sizeof(command));
    obey(command);
    return true;
  }
  std::array<int, kRankDescriptors> descriptors;
  std::memcpy(descriptors.data(), CMSG_DATA(header), sizeof(descriptors));
  prepare({packet.data(), static_cast<std::size_t>(got)}, descriptors);
  return true;
}

// Waits for all before it starts the first, so that neither side can block the other with both
// queues full.
void GuardianProcess::prepare(std::string_view packet,
                              const std::array<int, kRankDescriptors>& descriptors) {
  StartHeader header;
  std::memcpy(&header, packet.data(), sizeof(header));
  packet.remove_prefix(sizeof(header));
  RankStart rank{.slot = header.slot,
                 .variables = {},
                 .cpus = std::vector<int>(static_cast<std::size_t>(header.num_cpus)),
                 .standard_output = net::Fd(descriptors[0]),
                 .standard_error = net::Fd(descriptors[1]),
                 .line = net::Fd(descriptors[2]),
                 .reads_terminal = header.reads_terminal != 0};
  for (int& cpu : rank.cpus) {
    std::memcpy(&cpu, packet.data(), sizeof(cpu));
    packet.remove_prefix(sizeof(cpu));
  }
  while (!packet.empty()) {
    const auto end = packet.find('\0');
    rank.variables.emplace_back(packet.substr(0, end));
    packet.remove_prefix(std::min(end, packet.size() - 1) + 1);
  }
  rank.variables.push_back(fmt::format("LOCKSTEP_LINE_FD={}", rank.line.get()));
  prepared_.push_back(std::move(rank));
  if (header.last == 0) return;
  for (const RankStart& one : prepared_) spawn(one);
  prepared_.clear();  // only the ranks hold their ends now
}

void GuardianProcess::spawn(const RankStart& rank) {
  std::vector<std::string> environment = merged_environment(rank.variables);
  const std::vector<char*> environment_pointers = pointers(environment);
  const std::vector<char*> command_pointers = pointers(setup_.command);
  // Ranks that read from one terminal would fight over what its user types.
  const bool reads_nothing = ::isatty(STDIN_FILENO) == 1 && !rank.reads_terminal;
  const net::Fd nothing(reads_nothing ? ::open("/dev/null", O_RDONLY | O_CLOEXEC) : -1);
  const CpuSet cpus(rank.cpus);
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    report({Guardian::Event::Kind::spawn_failed, rank.slot, errno});
    return;
  }
  const net::Fd failure(ends[0]);
  net::Fd failure_of_rank(ends[1]);
  const Start start{.command = command_pointers.data(),
                    .environment = environment_pointers.data(),
                    .standard_input = nothing.get(),
                    .standard_output = rank.standard_output.get(),
                    .standard_error = rank.standard_error.get(),
                    .line = rank.line.get(),
                    .cpus = rank.cpus.empty() ? nullptr : &cpus,
                    .guardian = ::getpid(),
                    .failure = failure_of_rank.get()};
  const pid_t pid = ::vfork();
  if (pid == 0) become_rank(start);
  int error = pid < 0 ? errno : 0;
  failure_of_rank.reset();
  if (pid > 0) {
    while (::read(failure.get(), &error, sizeof(error)) < 0 && errno == EINTR) {
    }
  }
  if (error != 0) {
    report({Guardian::Event::Kind::spawn_failed, rank.slot, error});
  } else {
    pids_[static_cast<std::size_t>(rank.slot)] = pid;
    report({Guardian::Event::Kind::started, rank.slot, pid});
  }
}

void GuardianProcess::reap() {
  signalfd_siginfo ignored;
  while (::read(children_.get(), &ignored, sizeof(ignored)) > 0) {
  }
  int status = 0;
  for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    for (std::size_t slot = 0; slot < pids_.size(); ++slot) {
      if (pids_[slot] != pid) continue;  // all others are orphans we adopted
      pids_[slot] = 0;
      report({Guardian::Event::Kind::ended, static_cast<std::int32_t>(slot), status});
    }
  }
}

void GuardianProcess::obey(const GuardianCommand& command) {
  switch (command.kind) {
    case GuardianCommand::Kind::signal:
      if (const pid_t pid = pids_[static_cast<std::size_t>(command.slot)]; pid > 0)
        ::kill(-pid, command.signal);
      break;
    case GuardianCommand::Kind::sweep: report({Guardian::Event::Kind::swept, 0, sweep()}); break;
    case GuardianCommand::Kind::clear: report({Guardian::Event::Kind::cleared, 0, clear()}); break;
  }
}

void GuardianProcess::report(Guardian::Event event) {
  ::send(channel_.get(), &event, sizeof(event), MSG_NOSIGNAL);
}

int GuardianProcess::sweep() {
  return static_cast<int>(kill_descendants(Deadline::after(milliseconds(3000)), pids_).size());
}

int GuardianProcess::clear() {
  // Groups first: one call reaches all of a rank's usual children at the same moment.
  for (const pid_t pid : pids_)
    if (pid > 0) ::kill(-pid, SIGKILL);
  // How ranks end from here on is still of interest.
  bool running = true;
  for (const Deadline deadline = Deadline::after(milliseconds(2000)); running;) {
    reap();
    running = false;
    for (const pid_t pid : pids_) running |= pid > 0;
    if (!running || deadline.passed()) break;
    pollfd ready{children_.get(), POLLIN, 0};
    ::poll(&ready, 1, deadline.poll_timeout(milliseconds(20)));
  }
  std::fill(pids_.begin(), pids_.end(), 0);
  return sweep();
}

void GuardianProcess::leave() {
  const int stuck = clear();
  if (!setup_.flight_directory.empty()) remove_without_dumps(setup_.flight_directory);
  ::_exit(stuck == 0 ? 0 : 1);
}

}  // namespace lockstep::elastic
