#include <lockstep/launch/agent.h>

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/flight/dump.h>
#include <lockstep/launch/processes/user_signals.h>

namespace lockstep::launch {

namespace {

// Peers of a killed process notice that before its parent does: they may have given up and ended by
// then. The process that was ended by a signal is the first that failed, and may turn up within
// this time.
constexpr milliseconds kCauseTurnsUp(150);
// A process that is on its way out by then, or that others know to have left, is waited for so much
// longer.
constexpr milliseconds kCauseEnds(5000);
constexpr milliseconds kBetweenLooks(20);  // at whether it has ended
constexpr std::size_t kLastLines = 10;
constexpr std::size_t kLongestLastLine = 500;

const char* spawn_advice(int error) {
  switch (error) {
    case ENOEXEC: return "it is neither a program for this machine nor a script with a '#!' line";
    case ENOENT: return "the interpreter in its '#!' line, or its loader, does not exist";
    case EACCES: return "it, or a folder above it, may not be executed by this user";
    case EAGAIN: return "too many processes; raise 'ulimit -u' or run fewer ranks";
    case E2BIG: return "its arguments and environment are too long";
    default: return "see the system's message";
  }
}

}  // namespace

Agent::Agent(const RankTable& table, Guardian& guardian, std::unique_ptr<Peers>& peers,
             RankProcesses& processes, std::array<Sink*, 2> sinks, int signals,
             const ProgressPage& progress, Options options)
    : table_(table),
      guardian_(guardian),
      peers_(peers),
      processes_(processes),
      sinks_(sinks),
      signals_(signals),
      options_(std::move(options)),
      watch_(processes.num_ranks(), progress, options_.stuck_after) {}

void Agent::run() {
  while (!finished()) {
    wait();
    handle_guardian();
    for (int slot = 0; slot < processes_.num_slots(); ++slot)
      if (processes_[slot].runs) read_line(processes_[slot]);
    handle_signals();
    watch_ranks();
    peers_->attend();
    follow_pause();
    if (auto successor = peers_->successor()) peers_ = std::move(successor);
    advance();
    if (stage_ == Stage::running) options_.tend_spares();
    for (int slot = 0; slot < processes_.num_slots(); ++slot)
      for (RankStream& stream : processes_[slot].streams) stream.show_incomplete(Clock::now());
    for (Sink* sink : sinks_) {
      const std::size_t before = sink->backlog();
      sink->flush();
      if (sink->backlog() < before) last_progress_ = Clock::now();
    }
    if (const int error = sinks_[0]->error(); error != 0 && !std::exchange(told_lost_, true)) {
      say(error == EPIPE
              ? "nobody reads the standard output any more; the job goes on without"
              : fmt::format("the standard output cannot be written: {}; the job goes on without",
                            std::strerror(error)));
    }
  }
}

void Agent::wait() {
  std::vector<pollfd> polled;
  std::vector<RankStream*> streams;
  const auto now = Clock::now();
  for (int slot = 0; slot < processes_.num_slots(); ++slot) {
    for (RankStream& stream : processes_[slot].streams) {
      if (!stream.open() || stream.held_back() || stream.waits_for_line(now)) continue;
      polled.push_back({stream.fd(), POLLIN, 0});
      streams.push_back(&stream);
    }
  }
  for (int slot = 0; slot < processes_.num_slots(); ++slot)
    if (processes_[slot].runs && processes_[slot].line)
      polled.push_back({processes_[slot].line.get(), POLLIN, 0});
  polled.push_back({signals_, POLLIN, 0});
  if (!guardian_.gone()) polled.push_back({guardian_.fd(), POLLIN, 0});
  for (const Sink* sink : sinks_)
    if (sink->backlog() > 0) polled.push_back({sink->fd(), POLLOUT, 0});
  peers_->add_to(polled);
  int timeout = stage_deadline_.poll_timeout(suspects_.empty() ? Peers::kBeat / 2 : kBetweenLooks);
  if (stage_ == Stage::ended && peers_->failure()) timeout = 20;
  if (::poll(polled.data(), polled.size(), timeout) <= 0) return;
  for (std::size_t i = 0; i < streams.size(); ++i)
    if (polled[i].revents != 0) streams[i]->read();
}

Failure Agent::failure_of_host(Failure::Kind kind) const {
  return {.kind = kind,
          .node_rank = table_.node_rank,
          .host = table_.here().host,
          .generation = table_.generation};
}

Failure Agent::failure_of(RankProcess& process, Failure::Kind kind) {
  process.drain();  // what it wrote last is still in the pipe
  Failure failure = failure_of_host(kind);
  failure.rank = table_.first_rank() + process.local_rank;
  failure.local_rank = process.local_rank;
  failure.pid = process.pid;
  failure.final = process.final;
  failure.blame = process.blame;
  failure.last_lines = process.last_lines(kLastLines);
  for (const StreamFile& file : process.files)
    if (!file.path.empty() && kind != Failure::Kind::spawn)
      failure.output_files.push_back(file.path.string());
  for (std::string& line : failure.last_lines)
    if (line.size() > kLongestLastLine) line = line.substr(0, kLongestLastLine) + "...";
  return failure;
}

Failure Agent::failure_of_end(RankProcess& process, int status) {
  Failure failure =
      failure_of(process, WIFSIGNALED(status) ? Failure::Kind::signal : Failure::Kind::exit);
  failure.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  failure.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return failure;
}

void Agent::handle_guardian() {
  while (const auto event = guardian_.next()) {
    switch (event->kind) {
      case Guardian::Event::Kind::started: processes_[event->slot].pid = event->value; break;
      case Guardian::Event::Kind::spawn_failed: {
        RankProcess& process = processes_[event->slot];
        process.runs = false;
        const std::string detail =
            fmt::format("{} ({})", std::strerror(event->value), spawn_advice(event->value));
        if (process.local_rank == RankProcess::kSpare) {
          if (!processes_.lost_spare(process))
            say(fmt::format("spares cannot be started: {}: no more of them are tried", detail));
          break;
        }
        Failure failure = failure_of(process, Failure::Kind::spawn);
        failure.exit_code = event->value == ENOENT ? 127 : 126;
        failure.detail = detail;
        fail(failure);
        break;
      }
      case Guardian::Event::Kind::ended: handle_end(event->slot, event->value); break;
      case Guardian::Event::Kind::cleared:
        for (int slot = 0; slot < processes_.num_slots(); ++slot) processes_[slot].runs = false;
        [[fallthrough]];
      case Guardian::Event::Kind::swept:
        if (event->value > 0)
          say(fmt::format("{} of the processes that were killed do not end: the kernel holds them",
                          event->value));
        enter(Stage::ended, kStuckReader);
        break;
    }
  }
  if (guardian_.gone() && processes_.count_ranks([](const RankProcess&) { return true; }) > 0) {
    Failure failure = failure_of_host(Failure::Kind::node_lost);
    failure.detail = "the process that guards its ranks was killed";
    fail(failure);
    kill_descendants(Deadline::after(kKilling));  // they are our children now
    for (int slot = 0; slot < processes_.num_slots(); ++slot) processes_[slot].runs = false;
    enter(Stage::ended, kStuckReader);
  }
}

void Agent::handle_end(int slot, int status) {
  RankProcess& process = processes_[slot];
  read_line(process);  // its last words are still on the line
  process.runs = false;
  const bool well = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  process.ended_well = well;
  if (process.local_rank == RankProcess::kSpare) {
    process.drain();
    if (stage_ == Stage::running && !processes_.lost_spare(process))
      say("spares end as soon as they are started: no more of them are");
    return;
  }
  if (process.untold && stage_ == Stage::running) {
    const Failure failure = failure_of_end(process, status);
    say(fmt::format("{}; it could not be told that it is part of generation {}: it is started "
                    "anew\n{}",
                    failure.sentence(), table_.generation,
                    failure.machine_line(Failure::Aftermath::restarted)));
    options_.give_place(process.local_rank);
    return;
  }
  if (well || interrupted_) return;
  const bool running = stage_ == Stage::running;
  // It is no news how ranks end that end with the generation or the job, unless they have said
  // before that a restart would not help.
  if ((process.to_end || (!running && !process.came_up)) && !process.final) return;
  const Failure failure = failure_of_end(process, status);
  if (!running && failure.final) {
    peers_->announce(failure);
  } else if (!running) {
    further_failures_.push_back(failure);
  } else if (failure.final || (WIFSIGNALED(status) && failure.blame.ranks.empty())) {
    fail(failure);  // this rank did not end because of another one
  } else {
    if (suspects_.empty()) {
      suspect_until_ = Deadline::after(kCauseTurnsUp);
      cause_ends_by_ = Deadline::after(kCauseEnds);
    }
    suspects_.push_back(failure);
  }
}

void Agent::read_line(RankProcess& process) {
  while (const auto message = process.hear()) {
    if (message->word == LineMessage::Word::stays) {
      process.stays = process.came_up = true;
      if (process.is_spare()) processes_.spare_waits();
    }
    // Counts only for the generation that is over, and so only after it was asked to leave.
    if (message->word == LineMessage::Word::left) process.left = asked_to_leave_;
    // A rank that was told to end may say so because of that.
    if (message->word == LineMessage::Word::final && !process.to_end) process.final = true;
    if (message->word == LineMessage::Word::blames) {
      // A later group may fail because this rank gave up the first one: only the first counts.
      const Blame said = Blame::of(*message);
      if (said.ranks.empty() || process.blame.ranks.empty()) process.blame = said;
    }
  }
}

void Agent::handle_signals() {
  signalfd_siginfo info;
  while (::read(signals_, &info, sizeof(info)) == sizeof(info))
    handle_signal(static_cast<int>(info.ssi_signo));
}

void Agent::handle_signal(int signal) {
  if (signal == SIGTSTP) {
    pause();
    return;
  }
  const bool first = !std::exchange(interrupted_, true);
  if (first) {
    Failure failure = failure_of_host(Failure::Kind::interrupted);
    failure.exit_code = 128 + signal;
    failure.signal = signal;
    peers_->announce(failure);
  }
  if (stage_ == Stage::running || stage_ == Stage::noticing) {
    // Erases what a progress bar, and the terminal's own ^C, have left on the line.
    if (!options_.interruption_note.empty())
      sinks_[1]->append(fmt::format("{}lockstep: {}\n", sinks_[1]->terminal() ? "\r\x1b[K" : "",
                                    options_.interruption_note));
    signal_ranks_to_end(signal);
    enter(signal == SIGINT ? Stage::interrupted : Stage::terminated, options_.interrupt_grace);
  } else if (stage_ == Stage::interrupted) {  // they insist: no more waiting at this stage
    end_politely();
  } else if ((stage_ == Stage::terminated || stage_ == Stage::leaving) && !first) {
    guardian_.clear();
    enter(Stage::killed, kKilling);
  } else if (stage_ == Stage::ended) {
    impatient_ = true;
  }
}

// Stops the launcher, so that its user has the shell back, and with it the ranks of all hosts. A
// job that is about to end does so first.
void Agent::pause() {
  if (stage_ != Stage::running) return;
  if (!peers_->announce_pause()) {
    say("Ctrl-Z is ignored: this host would be taken for lost");
    return;
  }
  follow_pause();
  for (Sink* sink : sinks_) sink->flush();
  stop_until_continued();
  peers_->announce_resume();
}

void Agent::follow_pause() {
  const bool hold = stage_ == Stage::running && peers_->paused();
  if (hold == held_) return;
  held_ = hold;
  for (int slot = 0; slot < processes_.num_slots(); ++slot)
    if (processes_[slot].runs) guardian_.signal(slot, hold ? SIGSTOP : SIGCONT);
  if (!hold) watch_.resume(Clock::now());
  if (table_.num_nodes() > 1)
    say(hold ? "the job stands still, by Ctrl-Z on one of its hosts" : "the job goes on");
}

std::string Agent::name_of(const RankProcess& process) const {
  return fmt::format("rank {} (pid {})", table_.first_rank() + process.local_rank, process.pid);
}

void Agent::watch_ranks() {
  if (stage_ != Stage::running || held_) return;
  std::vector<int> pids;
  for (int rank = 0; rank < processes_.num_ranks(); ++rank) {
    const RankProcess* const process = processes_.of_rank(rank);
    pids.push_back(process == nullptr ? 0 : process->pid);
  }
  for (const RankWatch::Finding& finding : watch_.look(pids, Clock::now()))
    if (stage_ == Stage::running) handle(finding);
}

// A stopped rank is a failure only where the job can go on without it: its user may have a reason.
void Agent::handle(const RankWatch::Finding& finding) {
  using Kind = RankWatch::Finding::Kind;
  RankProcess& process = *processes_.of_rank(finding.local_rank);
  if (finding.kind == Kind::stuck) {
    Failure failure = failure_of(process, Failure::Kind::stuck);
    failure.step = static_cast<std::int64_t>(finding.step);
    failure.detail =
        fmt::format("no progress for {:.1f} s, at step {}",
                    std::chrono::duration<double>(finding.still_for).count(), finding.step);
    // Ranks must leave their dumps before any of them is ended.
    flight::demand_dumps(options_.flight_directory);
    process.stays = false;
    process.to_end = true;
    fail(failure);
  } else if (finding.kind == Kind::goes_on) {
    say(name_of(process) + " goes on");
  } else if (table_.num_restarts < table_.max_restarts) {
    Failure failure = failure_of(process, Failure::Kind::stopped);
    failure.signal = SIGSTOP;
    failure.exit_code = 128 + SIGSTOP;
    process.stays = false;
    process.to_end = true;
    fail(failure);
    guardian_.signal(processes_.slot_of(process), SIGKILL);  // no other signal reaches it
  } else {
    say(fmt::format("{} is stopped, by SIGSTOP or a terminal: 'kill -CONT {}' on host {} lets it "
                    "go on",
                    name_of(process), process.pid, table_.here().host));
  }
}

void Agent::say_whom_it_waits_for() {
  told_waiting_ = true;
  std::string whom;
  for (int slot = 0; slot < processes_.num_slots(); ++slot) {
    const RankProcess& process = processes_[slot];
    if (!process.is_rank() || process.left) continue;
    whom += (whom.empty() ? "" : ", ") + name_of(process);
    if (state_of(process.pid).stopped())
      whom += fmt::format(", which is stopped ('kill -CONT {}' lets it go on)", process.pid);
  }
  const double left = std::chrono::duration<double>(stage_deadline_.remaining()).count();
  say(fmt::format("waiting up to {:.0f} s for {} to {}", std::ceil(left), whom,
                  stage_ == Stage::leaving ? "leave its step" : "end"));
}

void Agent::fail(const Failure& failure) {
  if (stage_ != Stage::running) return;
  peers_->announce(failure);
  if (!explained(failure, options_.explained_exit_codes))
    say(failure.sentence() + ending_the_others(failure));
  enter(Stage::noticing, kNoticing);
}

// Finds the failure that the others followed, once no earlier one can turn up any more.
void Agent::find_first_failure() {
  if (suspects_.empty()) return;
  if (stage_ != Stage::running) {
    further_failures_.insert(further_failures_.end(), suspects_.begin(), suspects_.end());
    suspects_.clear();
    return;
  }
  Failure first = suspects_[first_of(suspects_)];
  if (cause_may_turn_up(first)) return;
  std::vector<int> well;
  for (const int rank : first.blame.ranks) {
    const int local_rank = rank - table_.first_rank();
    if (local_rank >= 0 && processes_.ended_well(local_rank)) well.push_back(rank);
  }
  if (!well.empty())
    first.detail = fmt::format("{} had ended before, with exit code 0", list_ranks(well));
  suspects_.clear();
  fail(first);
}

// Whether a failure that caused `first` may still turn up. A rank that blames nobody may not know
// the culprit: a rank that ends at this moment, for instance by a signal, may be the cause. A rank
// that blames others has seen them go: their failures are waited for, on this host and on others.
bool Agent::cause_may_turn_up(const Failure& first) {
  if (cause_ends_by_.passed()) return false;
  const auto blames = [](const Failure& one, int rank) {
    return std::find(one.blame.ranks.begin(), one.blame.ranks.end(), rank) != one.blame.ranks.end();
  };
  if (first.blame.ranks.empty() &&
      std::any_of(suspects_.begin(), suspects_.end(),
                  [&](const Failure& one) { return blames(one, first.rank); }))
    return false;
  bool blamed_are_left = first.blame.ranks.empty();
  for (const Failure& suspect : suspects_)
    for (const int rank : suspect.blame.ranks) {
      const int local_rank = rank - table_.first_rank();
      const bool here = local_rank >= 0 && local_rank < processes_.num_ranks();
      blamed_are_left |= !here || processes_.of_rank(local_rank) != nullptr;
    }
  if (!blamed_are_left) return false;
  // A rank that others have waited for in vain need not end at all.
  const bool left = !first.blame.ranks.empty() && first.blame.fault != fault_name(Fault::timeout);
  if (left) return true;
  const bool waits = !suspect_until_.passed();
  return processes_.count_ranks(
             [waits](const RankProcess& one) { return waits || state_of(one.pid).ending(); }) > 0;
}

// Tells of ranks that failed after the first failure in a generation that is followed by another:
// they are replaced with it. A rank that ended with an exit code may have done so because of the
// first failure, and is not told of, unless there was none because the job grows.
void Agent::say_further_failures() {
  if (!peers_->decision()) return;
  const bool growing = peers_->decision()->action == Decision::Action::grow;
  for (const Failure& failure : further_failures_)
    if (goes_on() &&
        (growing || (failure.kind == Failure::Kind::signal && failure.blame.ranks.empty())))
      say(failure.sentence() + "\n" + failure.machine_line(Failure::Aftermath::restarted));
  further_failures_.clear();
}

void Agent::enter(Stage stage, milliseconds span) {
  stage_ = stage;
  stage_deadline_ = Deadline::after(span);
  stage_since_ = Clock::now();
  told_waiting_ = false;
}

}  // namespace lockstep::launch
