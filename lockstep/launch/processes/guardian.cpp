#include <lockstep/launch/processes/guardian.h>

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/processes/flight_directory.h>
#include <lockstep/launch/processes/rank_setup.h>
#include <lockstep/launch/processes/rank_watch.h>
#include <lockstep/net/fd.h>

namespace lockstep::launch {

// A request of the launcher, other than a start.
struct GuardianCommand {
  enum class Kind : std::int32_t { signal, sweep, clear };
  Kind kind = Kind::signal;
  std::int32_t slot = 0;    // with signal
  std::int32_t signal = 0;  // likewise
};

// Comes before the variables in the packet that starts a rank; its descriptors come along.
struct StartHeader {
  std::int32_t slot = 0;
  std::int32_t last = 1;  // 1 in the last of the ranks that are started together
  std::int32_t num_cpus = 0;
  std::int32_t reads_input = 0;
};

// The descriptors: standard output, standard error and the line.
constexpr std::size_t kRankDescriptors = 3;

namespace {

std::vector<pid_t> children_but(const std::vector<pid_t>& spared) {
  std::vector<pid_t> found;
  DIR* proc = ::opendir("/proc");
  if (proc == nullptr) return found;
  const pid_t self = ::getpid();
  while (const dirent* entry = ::readdir(proc)) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    const auto pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (state_of(pid).parent != self) continue;
    if (std::find(spared.begin(), spared.end(), pid) == spared.end()) found.push_back(pid);
  }
  ::closedir(proc);
  return found;
}

}  // namespace

void adopt_orphans() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0)
    throw UsageError("cannot become the parent of orphaned processes: {}", std::strerror(errno));
}

std::vector<pid_t> kill_descendants(const Deadline& deadline, const std::vector<pid_t>& spared) {
  for (milliseconds pause(1);; pause = std::min(pause * 2, milliseconds(20))) {
    // Spared processes are left for their owner to wait for.
    std::vector<pid_t> found = children_but(spared);
    for (const pid_t child : found) ::kill(child, SIGKILL);
    std::erase_if(found, [](pid_t child) { return ::waitpid(child, nullptr, WNOHANG) == child; });
    if (found.empty() && children_but(spared).empty()) return {};
    if (deadline.passed()) return found;
    std::this_thread::sleep_for(pause);
  }
}

namespace {

// The guardian's own side. Runs in the forked child, alone in one thread.
class GuardianProcess {
 public:
  GuardianProcess(GuardianSetup setup, net::Fd channel);

  [[noreturn]] void run();

 private:
  void obey(const GuardianCommand& command);
  void prepare(std::string_view packet, const std::array<int, kRankDescriptors>& descriptors);
  void spawn(const RankStart& rank);
  void reap();
  int sweep();    // returns how many processes are left because the kernel holds them
  int clear();    // likewise
  bool listen();  // false once the launcher has vanished
  void report(Guardian::Event event);
  [[noreturn]] void leave();

  GuardianSetup setup_;
  net::Fd channel_;
  net::Fd children_;                 // a signalfd
  std::vector<RankStart> prepared_;  // until all that are to be started together have come
  std::vector<pid_t> pids_;          // by slot; 0 where nothing runs
};

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
// make system calls. A failure in it comes back through a pipe that a successful exec closes, and
// not through the shared memory, because the thread sanitizer turns vfork into fork.
struct Start {
  char* const* command;
  char* const* environment;
  int standard_input;  // -1: inherited
  int standard_output;
  int standard_error;
  int line;
  const CpuSet* cpus;  // or null
  pid_t guardian;
  int failure;  // the pipe that takes the errno
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
  // Pinning only affects speed: a rank that may not be pinned runs all the same.
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

GuardianProcess::GuardianProcess(GuardianSetup setup, net::Fd channel)
    : setup_(std::move(setup)),
      channel_(std::move(channel)),
      pids_(static_cast<std::size_t>(setup_.num_slots), 0) {}

void GuardianProcess::run() {
  try {
    ::prctl(PR_SET_NAME, "lockstep-guard");
    // In a session of its own, neither Ctrl-C nor a kill of the launcher's group reaches it. All
    // signals are blocked: it leaves only when the launcher says so or vanishes.
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

// Starts the ranks only when all of them have come, so that the two sides cannot block each other
// with both queues full.
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
                 .reads_input = header.reads_input != 0};
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
  // Ranks that share one standard input would take parts of it from each other.
  const net::Fd nothing(rank.reads_input ? -1 : ::open("/dev/null", O_RDONLY | O_CLOEXEC));
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
      if (pids_[slot] != pid) continue;  // it is an orphan that we adopted
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
  // Groups come first: one call reaches most of a rank's children at the same moment.
  for (const pid_t pid : pids_)
    if (pid > 0) ::kill(-pid, SIGKILL);
  // The launcher still wants to know how these ranks end.
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

}  // namespace

std::pair<net::Fd, net::Fd> packet_sockets() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw UsageError("cannot make a pair of sockets: {}; raise 'ulimit -n' or run fewer ranks",
                     std::strerror(errno));
  return {net::Fd(ends[0]), net::Fd(ends[1])};
}

Guardian::Guardian(GuardianSetup setup) {
  net::Fd theirs;
  std::tie(channel_, theirs) = packet_sockets();
  pid_ = ::fork();
  if (pid_ < 0)
    throw UsageError("cannot start another process: {}; check 'ulimit -u' and the memory left",
                     std::strerror(errno));
  if (pid_ == 0) {
    channel_.reset();
    GuardianProcess(std::move(setup), std::move(theirs)).run();
  }
}

Guardian::~Guardian() {
  channel_.reset();
  int status = 0;
  if (!gone_) ::waitpid(pid_, &status, 0);
}

void Guardian::start(const std::vector<RankStart>& ranks) {
  for (const RankStart& rank : ranks) {
    const StartHeader start{.slot = rank.slot,
                            .last = &rank == &ranks.back() ? 1 : 0,
                            .num_cpus = static_cast<std::int32_t>(rank.cpus.size()),
                            .reads_input = rank.reads_input ? 1 : 0};
    std::string block(reinterpret_cast<const char*>(&start), sizeof(start));
    block.append(reinterpret_cast<const char*>(rank.cpus.data()), rank.cpus.size() * sizeof(int));
    for (const std::string& variable : rank.variables) block.append(variable).push_back('\0');
    const std::array<int, kRankDescriptors> descriptors = {
        rank.standard_output.get(), rank.standard_error.get(), rank.line.get()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(descriptors))> control{};
    iovec payload{block.data(), block.size()};
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(descriptors));
    std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(descriptors));
    ssize_t sent = 0;
    do {
      sent = ::sendmsg(channel_.get(), &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    // next() notices a guardian that was killed.
    if (sent < 0 && errno == EPIPE) return;
    if (sent != static_cast<ssize_t>(block.size()))
      throw UsageError("cannot hand {} bytes of environment to a rank: {}", block.size(),
                       std::strerror(errno));
  }
}

void Guardian::signal(int slot, int signal) {
  command({.kind = GuardianCommand::Kind::signal, .slot = slot, .signal = signal});
}

void Guardian::sweep() { command({.kind = GuardianCommand::Kind::sweep}); }

void Guardian::clear() { command({.kind = GuardianCommand::Kind::clear}); }

void Guardian::command(const GuardianCommand& command) {
  ::send(channel_.get(), &command, sizeof(command), MSG_NOSIGNAL);
}

std::optional<Guardian::Event> Guardian::next() {
  Event event;
  while (true) {
    const ssize_t got = ::recv(channel_.get(), &event, sizeof(event), MSG_DONTWAIT);
    if (got == sizeof(event)) return event;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return std::nullopt;
    if (!gone_) {
      int status = 0;
      ::waitpid(pid_, &status, 0);
    }
    gone_ = true;
    return std::nullopt;
  }
}

}  // namespace lockstep::launch
