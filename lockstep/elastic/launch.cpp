#include <lockstep/elastic/launch.h>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/device/host.h>
#include <lockstep/elastic/agent.h>
#include <lockstep/elastic/cores.h>
#include <lockstep/elastic/descendants.h>
#include <lockstep/elastic/guardian.h>
#include <lockstep/elastic/peers.h>
#include <lockstep/elastic/rank_environment.h>
#include <lockstep/elastic/rendezvous.h>
#include <lockstep/elastic/report_on_signal.h>
#include <lockstep/flight/report.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

namespace {

constexpr int kPipeBytes = 1 << 20;  // so that a rank that writes much seldom waits for us

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

sigset_t user_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGHUP}) {
    struct sigaction action {};
    // One that is ignored (nohup) stays so.
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN)
      ::sigaddset(&set, signal);
  }
  return set;
}

// While the launchers meet, which may take minutes, a signal ends this process at once: there is
// nothing yet that the guardian would not clear away.
class EndWhileWaiting {
 public:
  explicit EndWhileWaiting(sigset_t signals)
      : thread_([signals](const std::stop_token& stop) {
          while (!stop.stop_requested()) {
            const timespec slice{0, 50'000'000};
            const int signal = ::sigtimedwait(&signals, nullptr, &slice);
            if (signal > 0) ::_exit(128 + signal);
          }
        }) {}

 private:
  std::jthread thread_;
};

net::Secret job_secret(const LaunchOptions& options) {
  const std::string file = !options.secret_file.empty()
                               ? options.secret_file
                               : environment_variable("LOCKSTEP_SECRET_FILE").value_or("");
  if (!file.empty()) return net::Secret::from_file(file);
  if (options.num_nodes == 1) return net::Secret::random();
  throw UsageError(
      "a job on {} hosts needs a secret that all of them know: make one with '(umask 077; head -c "
      "32 /dev/urandom > job.secret)', copy it to every host ('scp -p job.secret HOST:'), and give "
      "each launcher --secret-file job.secret, or set LOCKSTEP_SECRET_FILE",
      options.num_nodes);
}

RendezvousOptions rendezvous_options(const LaunchOptions& options) {
  RendezvousOptions meeting{.num_nodes = options.num_nodes,
                            .node_rank = options.node_rank,
                            .num_local_ranks = options.num_local_ranks,
                            .host = options.local_addr.empty() ? host_name() : options.local_addr,
                            .run_id = options.run_id,
                            .timeout = options.timeout};
  if (options.num_nodes > 1) {
    if (!options.endpoint)
      throw UsageError("--nnodes {} needs an address where the launchers meet: give every one of "
                       "them the same --rdzv-endpoint HOST:PORT (or --master-addr and "
                       "--master-port), an address of node 0's host",
                       options.num_nodes);
    meeting.endpoint = *options.endpoint;
    meeting.master_addr = meeting.endpoint.host;
    return meeting;
  }
  meeting.endpoint = options.endpoint.value_or(net::Address{"127.0.0.1", 0});
  meeting.master_addr = options.master_addr.empty() ? meeting.endpoint.host : options.master_addr;
  // What rank 0 will listen on must be this host's and free: say so now, not from within a rank.
  if (options.master_port || !options.master_addr.empty())
    net::listen_tcp({meeting.master_addr, options.master_port.value_or(0)});
  meeting.master_port = options.master_port.value_or(0);
  return meeting;
}

// Where ranks leave flight recorder dumps: where the user said, or a folder that is removed at the
// end where nobody left one.
class FlightDirectory {
 public:
  FlightDirectory() {
    if (const auto wanted = environment_variable("LOCKSTEP_FLIGHT_DIR")) {
      std::error_code failed;
      fs::create_directories(*wanted, failed);
      if (failed)
        throw UsageError("LOCKSTEP_FLIGHT_DIR is '{}', which cannot be made: {}", *wanted,
                         failed.message());
      path_ = fs::absolute(*wanted).string();
      return;
    }
    path_ = (fs::temp_directory_path() / "lockstep-flight-XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr)
      throw UsageError("cannot make a folder in '{}': {}; set TMPDIR to one that can be written",
                       fs::temp_directory_path().string(), std::strerror(errno));
    temporary_ = true;
  }
  ~FlightDirectory() { ::rmdir(removable().c_str()); }
  FlightDirectory(const FlightDirectory&) = delete;
  FlightDirectory& operator=(const FlightDirectory&) = delete;

  const std::string& path() const { return path_; }
  // Whether a rank has left word of a call that failed, where only we know of the folder.
  bool tells_of_failures() const { return temporary_ && flight::tells_of_failures(path_); }
  // What ranks wrote because somebody asked served its purpose when the job has gone well.
  void clear() const {
    std::error_code ignored;
    if (temporary_) fs::remove_all(path_, ignored);
  }

  // What to remove at the end; empty where it is the user's own.
  std::string removable() const { return temporary_ ? path_ : ""; }

 private:
  std::string path_;
  bool temporary_ = false;
};

// One stream of one rank: what the rank writes to, and where we read it.
struct Plumbing {
  net::Fd rank_end;
  net::Fd our_end;  // empty where the rank writes to a file by itself
  net::Fd copy;
};

net::Fd open_log(const fs::path& path) {
  net::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (!file)
    throw UsageError("cannot write the log file '{}': {}", path.string(), std::strerror(errno));
  return file;
}

Plumbing lay_stream(const fs::path& log, bool redirected, bool teed) {
  Plumbing plumbing;
  if (redirected && !teed) {
    plumbing.rank_end = open_log(log);
    return plumbing;
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw UsageError("cannot make a pipe: {}; raise 'ulimit -n' or run fewer ranks",
                     std::strerror(errno));
  plumbing.our_end = net::Fd(ends[0]);
  plumbing.rank_end = net::Fd(ends[1]);
  ::fcntl(ends[0], F_SETPIPE_SZ, kPipeBytes);  // a wish: users have a limit on such memory
  if (teed) plumbing.copy = open_log(log);
  return plumbing;
}

void print_report(const Failure& failure, const FlightDirectory& flight, const fs::path& logs) {
  std::string text = fmt::format("lockstep: the job failed: {}\n", failure.sentence());
  if (!failure.last_lines.empty()) {
    text += fmt::format("lockstep: last lines of rank {}:\n", failure.rank);
    for (const std::string& line : failure.last_lines) text += "  | " + line + "\n";
  }
  if (!logs.empty()) text += fmt::format("lockstep: logs are in {}\n", logs.string());
  const std::string report = flight::merged_report(fs::path(flight.path()));
  if (!report.empty())
    text += fmt::format("lockstep: where the ranks of this host were (dumps in {}):\n{}",
                        flight.path(), report);
  text += failure.machine_line() + "\n";
  Sink sink(STDERR_FILENO);
  sink.append(text);
  const Deadline deadline = Deadline::after(milliseconds(1000));
  for (sink.flush(); sink.backlog() > 0; sink.flush())
    if (!net::wait_ready(sink.fd(), POLLOUT, deadline)) return;
}

}  // namespace

int launch(const LaunchOptions& options) {
  const std::vector<std::string> command = resolve_command(options.program, options.program_kind);
  const net::Secret secret = job_secret(options);
  const RendezvousOptions meeting = rendezvous_options(options);
  const auto num_ranks = static_cast<std::size_t>(options.num_local_ranks);

  const std::vector<int> cpus = allowed_cpus();
  const int cores = device::Host().num_usable_cores();
  const int threads = threads_per_rank(cores, options.num_local_ranks);
  const auto shares = options.binding == Binding::none
                          ? std::vector<std::vector<int>>{}
                          : core_shares(cpus, cores, options.num_local_ranks, threads);

  fs::path logs;
  if (options.redirects.any() || options.tee.any()) {
    logs = make_log_directory(options.log_directory, options.run_id, options.num_local_ranks);
    log::info("output of the ranks goes to {}", logs.string());
  }
  const FlightDirectory flight;
  GuardianSetup setup{.command = command, .flight_directory = flight.removable()};
  std::vector<std::array<Plumbing, 2>> plumbing(num_ranks);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    constexpr std::array kStreams = {Streams::output, Streams::error};
    for (std::size_t i = 0; i < 2; ++i) {
      const auto local_rank = static_cast<int>(rank);
      plumbing[rank][i] =
          lay_stream(logs / std::to_string(rank) / (i == 0 ? "stdout.log" : "stderr.log"),
                     includes(options.redirects.of(local_rank), kStreams[i]),
                     includes(options.tee.of(local_rank), kStreams[i]));
    }
    setup.ranks.push_back({std::move(plumbing[rank][0].rank_end),
                           std::move(plumbing[rank][1].rank_end),
                           shares.empty() ? std::vector<int>{} : shares[rank]});
  }
  const net::Fd secret_fd(secret.to_inheritable_descriptor());
  adopt_orphans();
  Guardian guardian(std::move(setup));

  // Threads inherit the mask, so that no thread but this one ever gets these signals.
  const sigset_t signals = user_signals();
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  const ReportOnSignal report_on_signal(flight.path());
  const net::Fd signal_fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  Membership membership = [&] {
    std::optional<EndWhileWaiting> early;
    if (options.num_nodes > 1) early.emplace(signals);
    return meet(meeting, secret);
  }();

  const Layout& layout = membership.layout;
  Sink output(STDOUT_FILENO), error(STDERR_FILENO);
  const std::array<Sink*, 2> sinks = {&output, &error};
  const bool colour = !environment_variable("NO_COLOR");
  std::vector<RankOutput> outputs(num_ranks);
  std::vector<std::vector<std::string>> variables;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const auto local_rank = static_cast<int>(rank);
    for (std::size_t i = 0; i < 2; ++i) {
      Plumbing& pipe = plumbing[rank][i];
      if (!pipe.our_end) continue;
      outputs[rank].streams.emplace_back(
          std::move(pipe.our_end),
          line_prefix(layout.first_rank() + local_rank, layout.world_size(),
                      colour && sinks[i]->terminal()),
          sinks[i], outputs[rank].tail.get(), std::move(pipe.copy));
    }
    variables.push_back(rank_environment(layout, local_rank,
                                         {.run_id = options.run_id,
                                          .role = options.role,
                                          .secret_fd = secret_fd.get(),
                                          .flight_directory = flight.path(),
                                          .threads = threads}));
  }
  Peers peers(layout, std::move(membership.channels));
  guardian.start_ranks(variables);
  Agent(layout, guardian, peers, outputs, sinks, signal_fd.get(),
        {.grace = options.grace,
         .explained_exit_codes = options.explained_exit_codes,
         .interruption_note = options.interruption_note})
      .run();
  if (!peers.failure()) {
    if (flight.tells_of_failures())
      log::info("the job succeeded, though calls in it have failed; dumps of the flight recorder "
                "are in {}",
                flight.path());
    else
      flight.clear();
    return 0;
  }
  if (!explained(*peers.failure(), options.explained_exit_codes))
    print_report(*peers.failure(), flight, logs);
  return peers.failure()->exit_code;
}

}  // namespace lockstep::elastic
