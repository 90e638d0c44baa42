#include <lockstep/launch/launch.h>

#include <poll.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <filesystem>
#include <memory>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/device/host/host.h>
#include <lockstep/flight/report.h>
#include <lockstep/launch/agent.h>
#include <lockstep/launch/processes/flight_directory.h>
#include <lockstep/launch/processes/guardian.h>
#include <lockstep/launch/processes/rank_processes.h>
#include <lockstep/launch/processes/rank_setup.h>
#include <lockstep/launch/processes/user_signals.h>
#include <lockstep/launch/rendezvous/rendezvous.h>
#include <lockstep/net/socket.h>

namespace lockstep::launch {

namespace fs = std::filesystem;

namespace {

// How long the leader has to pass on that this host's user ended a job that was being formed.
constexpr milliseconds kGoodbye(1000);

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

net::Secret job_secret(const LaunchOptions& options) {
  const std::string file = !options.secret_file.empty()
                               ? options.secret_file
                               : environment_variable("LOCKSTEP_SECRET_FILE").value_or("");
  if (!file.empty()) return net::Secret::from_file(file);
  if (options.max_nodes == 1) return net::Secret::random();
  throw UsageError(
      "a job on {} hosts needs a secret that all of them know: make one with '(umask 077; head -c "
      "32 /dev/urandom > job.secret)', copy it to every host ('scp -p job.secret HOST:'), and give "
      "each launcher --secret-file job.secret, or set LOCKSTEP_SECRET_FILE",
      node_range(options.min_nodes, options.max_nodes));
}

// How long ranks may take to save their state, or to complete a step, where there is no failure.
milliseconds interrupt_grace(const LaunchOptions& options) {
  return std::max(options.grace, options.interrupt_grace);
}

RendezvousOptions rendezvous_options(const LaunchOptions& options) {
  RendezvousOptions rendezvous{
      .min_nodes = options.min_nodes,
      .max_nodes = options.max_nodes,
      .max_restarts = options.max_restarts,
      .node_rank = options.node_rank,
      .num_local_ranks = options.num_local_ranks,
      .host = options.local_addr.empty() ? host_name() : options.local_addr,
      .run_id = options.run_id,
      .rendezvous = options.rendezvous,
      .endpoints = options.endpoints,
      .local_addr = options.local_addr,
      .timeout = options.timeout,
      .last_call = options.last_call,
      .leave_soon = interrupt_grace(options)};
  if (options.max_nodes > 1) {
    if (rendezvous.endpoints.empty())
      throw UsageError("--nnodes {} needs an address where the launchers meet: give every one of "
                       "them the same --rdzv-endpoint HOST:PORT (or --master-addr and "
                       "--master-port), an address of node 0's host",
                       node_range(options.min_nodes, options.max_nodes));
    for (const net::Address& endpoint : rendezvous.endpoints) net::resolve(endpoint);
    rendezvous.master_addr = rendezvous.endpoints.front().host;
    return rendezvous;
  }
  if (rendezvous.endpoints.empty()) rendezvous.endpoints = {{"127.0.0.1", 0}};
  rendezvous.master_addr =
      options.master_addr.empty() ? rendezvous.endpoints.front().host : options.master_addr;
  // Rank 0 will listen there: an address that is taken or not this host's is an error now, not one
  // from within a rank.
  if (options.master_port || !options.master_addr.empty())
    net::listen_tcp({rendezvous.master_addr, options.master_port.value_or(0)});
  rendezvous.master_port = options.master_port.value_or(0);
  return rendezvous;
}

bool same_file(int a, int b) {
  struct stat first {
  }, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

// Everything the launcher has for as long as the job goes on, through all generations.
class Launch {
 public:
  Launch(const LaunchOptions& options, std::vector<std::string> command);

  int run();

 private:
  std::unique_ptr<Peers> meet();
  std::optional<RankTable> next_table();
  void run_generation(const RankTable& table);
  void say_how_it_begins(const RankTable& table, const RankProcesses::Begun& begun);
  RankEnvironmentOptions environment_options() const;
  void report();

  const LaunchOptions& options_;
  const net::Secret secret_;
  const RendezvousOptions rendezvous_;
  const int threads_;
  fs::path logs_;     // empty where no output goes to files
  fs::path attempt_;  // the folder in it for this generation
  FlightDirectory flight_;
  const net::Fd secret_fd_;
  const ProgressPage progress_;
  Guardian guardian_;
  const sigset_t signals_;
  const net::Fd signal_fd_;
  // Where standard output and error are the same file, one sink writes both, so that no line comes
  // between the parts of another.
  Sink output_{STDOUT_FILENO};
  Sink own_error_{STDERR_FILENO};
  Sink& error_{same_file(STDOUT_FILENO, STDERR_FILENO) ? output_ : own_error_};
  RankProcesses processes_;
  std::unique_ptr<Peers> peers_;
  RankTable last_;  // the table of the generation that runs, or ran last
  bool guardian_lost_ = false;
};

GuardianSetup guardian_setup(const LaunchOptions& options, std::vector<std::string> command,
                             const FlightDirectory& flight) {
  adopt_orphans();
  return {.command = std::move(command),
          .num_slots = options.num_local_ranks + options.num_spares,
          .flight_directory = flight.removable()};
}

std::vector<std::vector<int>> cpus_of_ranks(const LaunchOptions& options, int threads) {
  if (options.binding == Binding::none) return {};
  return core_shares(allowed_cpus(), device::Host().num_usable_cores(), options.num_local_ranks,
                     threads);
}

Launch::Launch(const LaunchOptions& options, std::vector<std::string> command)
    : options_(options),
      secret_(job_secret(options)),
      rendezvous_(rendezvous_options(options)),
      threads_(threads_per_rank(device::Host().num_usable_cores(), options.num_local_ranks)),
      secret_fd_(secret_.to_inheritable_descriptor()),
      progress_(options.num_local_ranks),
      guardian_(guardian_setup(options, std::move(command), flight_)),
      signals_(take_over_signals()),
      signal_fd_(::signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK)),
      processes_(guardian_, {&output_, &error_},
                 {.num_ranks = options.num_local_ranks,
                  .num_spares = options.num_spares,
                  .cpus = cpus_of_ranks(options, threads_),
                  .streams = options.streams}) {
  if (!options.streams.redirects.any() && !options.streams.tee.any()) return;
  logs_ = make_log_directory(options.log_directory, options.run_id);
  log::info("output of the ranks goes to {}", logs_.string());
}

std::unique_ptr<Peers> Launch::meet() {
  std::optional<EndWhileWaiting> early;
  if (options_.max_nodes > 1) early.emplace(signals_);
  return join_job(rendezvous_, secret_);
}

int Launch::run() {
  peers_ = meet();
  while (auto table = next_table()) {
    last_ = std::move(*table);
    run_generation(last_);
    if (guardian_lost_ || !peers_->decision()) break;
    report();
    if (peers_->decision()->action == Decision::Action::end) return peers_->failure()->exit_code;
    peers_->announce_ready();
  }
  if (const auto& failure = peers_->failure()) {
    report();
    return failure->exit_code;
  }
  if (flight_.tells_of_failures())
    log::info("the job succeeded, though calls in it have failed; dumps of the flight recorder are "
              "in {}",
              flight_.path());
  else
    flight_.clear();
  // Output that is lost though somebody reads it is a failure of its own; the agent has said so.
  const auto lost = [](const Sink& sink) { return sink.error() != 0 && sink.error() != EPIPE; };
  return lost(output_) || lost(error_) ? 1 : 0;
}

// Waits for the next table; nothing where the job ends instead.
std::optional<RankTable> Launch::next_table() {
  std::optional<Deadline> leave_by;
  while (true) {
    peers_->attend();
    if (auto successor = peers_->successor()) peers_ = std::move(successor);
    if (auto table = peers_->next_table()) return table;
    const auto& decision = peers_->decision();
    if (decision && decision->action == Decision::Action::end) return std::nullopt;
    if (leave_by && leave_by->passed()) return std::nullopt;
    std::vector<pollfd> polled = {{signal_fd_.get(), POLLIN, 0}};
    peers_->add_to(polled);
    ::poll(polled.data(), polled.size(), static_cast<int>((Peers::kBeat / 5).count()));
    signalfd_siginfo info;
    while (::read(signal_fd_.get(), &info, sizeof(info)) == sizeof(info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGTSTP) {
        // The other launchers must know, or they would take this host for lost.
        if (peers_->announce_pause()) {
          stop_until_continued();
          peers_->announce_resume();
        }
        continue;
      }
      peers_->announce({.kind = Failure::Kind::interrupted,
                        .node_rank = last_.node_rank,
                        .host = rendezvous_.host,
                        .exit_code = 128 + signal,
                        .signal = signal,
                        .generation = last_.generation});
      leave_by = Deadline::after(kGoodbye);
    }
  }
}

RankEnvironmentOptions Launch::environment_options() const {
  return {.run_id = options_.run_id,
          .role = options_.role,
          .secret_fd = secret_fd_.get(),
          .progress_fd = progress_.descriptor(),
          .flight_directory = flight_.path(),
          .threads = threads_};
}

void Launch::say_how_it_begins(const RankTable& table, const RankProcesses::Begun& begun) {
  if (table.generation == 0) return;
  std::string text =
      fmt::format("lockstep: generation {} starts: {} ranks on {} node{}, {} of {} restarts used",
                  table.generation, table.world_size(), table.num_nodes(),
                  table.num_nodes() == 1 ? "" : "s", table.num_restarts, table.max_restarts);
  if (begun.stayed > 0) text += fmt::format("; {} stayed on this host", begun.stayed);
  if (begun.spares > 0)
    text += fmt::format("; {} spare{} in", begun.spares, begun.spares == 1 ? " steps" : "s step");
  error_.append(text + "\n");
}

void Launch::run_generation(const RankTable& table) {
  const std::array<Sink*, 2> sinks = {&output_, &error_};
  if (!logs_.empty()) attempt_ = logs_ / fmt::format("attempt_{}", table.generation);
  flight_.begin(table.generation);
  const ReportOnSignal report_on_signal(flight_.path());
  progress_.clear();
  const RankProcesses::Generation generation{
      .table = table, .logs = attempt_, .environment = [&](int local_rank) {
        return rank_environment(table, local_rank, environment_options());
      }};
  say_how_it_begins(table, processes_.begin(generation));
  Agent agent(table, guardian_, peers_, processes_, sinks, signal_fd_.get(), progress_,
              {.grace = options_.grace,
               .interrupt_grace = interrupt_grace(options_),
               .explained_exit_codes = options_.explained_exit_codes,
               .interruption_note = options_.interruption_note,
               .stuck_after = options_.stuck_after,
               .leave_within = options_.leave_within,
               .flight_directory = flight_.path(),
               .give_place = [&](int local_rank) { processes_.give_place(local_rank, generation); },
               .tend_spares =
                   [&] {
                     processes_.tend_spares(
                         attempt_, [&] { return spare_environment(environment_options()); });
                   }});
  agent.run();
  guardian_lost_ = agent.guardian_lost();
}

// Tells the user, and a program that watches, of the generation's failure.
void Launch::report() {
  const auto& failure = peers_->failure();
  if (!failure || explained(*failure, options_.explained_exit_codes)) return;
  const auto& decision = peers_->decision();
  const bool goes_on = !guardian_lost_ && decision && decision->action == Decision::Action::restart;
  std::string text = fmt::format("lockstep: the job {}: {}\n",
                                 goes_on ? "is started anew" : "failed", failure->sentence());
  if (!goes_on && failure->final && last_.num_restarts < last_.max_restarts)
    text += fmt::format("lockstep: no restart is made: rank {} has said that it would only fail so "
                        "again\n",
                        failure->rank);
  if (!failure->last_lines.empty()) {
    text += fmt::format("lockstep: last lines of rank {}:\n", failure->rank);
    for (const std::string& line : failure->last_lines) text += "  | " + line + "\n";
  }
  if (!failure->output_files.empty())
    text += fmt::format("lockstep: the output of rank {} is in {}{}\n", failure->rank,
                        fmt::join(failure->output_files, " and "),
                        failure->node_rank == last_.node_rank ? "" : " on host " + failure->host);
  if (!attempt_.empty()) text += fmt::format("lockstep: logs are in {}\n", attempt_.string());
  const std::string where = flight::merged_report(fs::path(flight_.path()));
  if (!where.empty())
    text += fmt::format("lockstep: where the ranks of this host were (dumps in {}):\n{}",
                        flight_.path(), where);
  text +=
      failure->machine_line(goes_on ? Failure::Aftermath::restarted : Failure::Aftermath::ended) +
      "\n";
  error_.append(text);
  error_.flush(Deadline::after(milliseconds(1000)));
}

}  // namespace

int launch(const LaunchOptions& options) {
  return Launch(options, resolve_command(options.program, options.program_kind)).run();
}

}  // namespace lockstep::launch
