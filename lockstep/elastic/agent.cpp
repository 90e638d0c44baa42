#include <lockstep/elastic/agent.h>

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/elastic/descendants.h>
#include <lockstep/flight/demand.h>

namespace lockstep::elastic {

namespace {

// A lost peer is noticed by the others within 0.2 s; they need that long to leave word of where
// they were. Together with the default grace, a job ends well within a second.
constexpr milliseconds kNoticing(250);
// SIGKILL takes this long only where the kernel holds a process.
constexpr milliseconds kKilling(6000);
// A reader that takes nothing for so long does not hold up the end of a job that failed.
constexpr milliseconds kStuckReader(1000);
// Nobody should have to guess what takes longer than this; or than that, where ranks were told to
// save what they have, and their user was told so.
constexpr milliseconds kSilentWait(1000);
constexpr milliseconds kSilentSave(10'000);
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

Agent::Agent(const Layout& layout, Guardian& guardian, std::unique_ptr<Peers>& peers,
             std::vector<RankOutput>& outputs, std::array<Sink*, 2> sinks, int signals,
             const ProgressPage& progress, Options options)
    : layout_(layout),
      guardian_(guardian),
      peers_(peers),
      outputs_(outputs),
      sinks_(sinks),
      signals_(signals),
      options_(std::move(options)),
      stage_deadline_(Deadline::never()),
      stage_since_(Clock::now()),
      watch_(static_cast<int>(outputs.size()), progress, options_.stuck_after),
      pids_(outputs.size(), 0),
      num_running_(static_cast<int>(outputs.size())),
      last_progress_(Clock::now()) {}

void Agent::run() {
  while (!finished()) {
    wait();
    hear_guardian();
    hear_user();
    watch_ranks();
    peers_->attend();
    if (auto successor = peers_->successor()) peers_ = std::move(successor);
    advance();
    for (Sink* sink : sinks_) {
      const std::size_t before = sink->backlog();
      sink->flush();
      if (sink->backlog() < before) last_progress_ = Clock::now();
    }
    if (sinks_[0]->lost() && !told_lost_) {
      told_lost_ = true;
      sinks_[1]->append(
          "lockstep: nobody reads the standard output any more; the job goes on without\n");
    }
  }
}

void Agent::wait() {
  std::vector<pollfd> polled;
  std::vector<RankStream*> streams;
  for (RankOutput& output : outputs_) {
    for (RankStream& stream : output.streams) {
      if (!stream.open() || stream.held_back()) continue;
      polled.push_back({stream.fd(), POLLIN, 0});
      streams.push_back(&stream);
    }
  }
  polled.push_back({signals_, POLLIN, 0});
  if (!guardian_.gone()) polled.push_back({guardian_.fd(), POLLIN, 0});
  for (const Sink* sink : sinks_)
    if (sink->backlog() > 0) polled.push_back({sink->fd(), POLLOUT, 0});
  peers_->add_to(polled);
  int timeout = stage_deadline_.poll_timeout(Peers::kBeat / 2);
  if (stage_ == Stage::ended && peers_->failure()) timeout = 20;
  if (::poll(polled.data(), polled.size(), timeout) <= 0) return;
  for (std::size_t i = 0; i < streams.size(); ++i)
    if (polled[i].revents != 0) streams[i]->read();
}

void Agent::drain(int local_rank) {
  for (RankStream& stream : outputs_[static_cast<std::size_t>(local_rank)].streams)
    while (stream.open() && !stream.held_back() && stream.read()) {
    }
}

Failure Agent::failure_of(int local_rank, Failure::Kind kind) {
  drain(local_rank);  // what it wrote last is still in the pipe
  Failure failure{.kind = kind,
                  .rank = layout_.first_rank() + local_rank,
                  .local_rank = local_rank,
                  .node_rank = layout_.node_rank,
                  .host = layout_.here().host,
                  .pid = pids_[static_cast<std::size_t>(local_rank)],
                  .generation = layout_.generation};
  failure.last_lines = outputs_[static_cast<std::size_t>(local_rank)].tail->lines(kLastLines);
  for (std::string& line : failure.last_lines)
    if (line.size() > kLongestLastLine) line = line.substr(0, kLongestLastLine) + "...";
  return failure;
}

void Agent::hear_guardian() {
  while (const auto event = guardian_.next()) {
    switch (event->kind) {
      case Guardian::Event::Kind::started:
        pids_[static_cast<std::size_t>(event->local_rank)] = event->value;
        break;
      case Guardian::Event::Kind::spawn_failed: {
        --num_running_;
        Failure failure = failure_of(event->local_rank, Failure::Kind::spawn);
        failure.exit_code = event->value == ENOENT ? 127 : 126;
        failure.detail =
            fmt::format("{} ({})", std::strerror(event->value), spawn_advice(event->value));
        fail(failure);
        break;
      }
      case Guardian::Event::Kind::ended: {
        --num_running_;
        const int status = event->value;
        const int pid = std::exchange(pids_[static_cast<std::size_t>(event->local_rank)], 0);
        if (stage_ != Stage::running || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) break;
        Failure failure = failure_of(
            event->local_rank, WIFSIGNALED(status) ? Failure::Kind::signal : Failure::Kind::exit);
        failure.pid = pid;
        failure.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        failure.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        fail(failure);
        break;
      }
      case Guardian::Event::Kind::cleared:
        num_running_ = 0;
        if (event->value > 0)
          sinks_[1]->append(fmt::format(
              "lockstep: {} of the processes that were killed do not end: the kernel holds them\n",
              event->value));
        enter(Stage::ended, kStuckReader);
        break;
    }
  }
  if (guardian_.gone() && num_running_ > 0) {
    fail({.kind = Failure::Kind::node_lost,
          .node_rank = layout_.node_rank,
          .host = layout_.here().host,
          .generation = layout_.generation,
          .detail = "the process that guards its ranks was killed"});
    kill_descendants(Deadline::after(kKilling));  // they are our children now
    num_running_ = 0;
    enter(Stage::ended, kStuckReader);
  }
}

void Agent::hear_user() {
  signalfd_siginfo info;
  while (::read(signals_, &info, sizeof(info)) == sizeof(info))
    hear_signal(static_cast<int>(info.ssi_signo));
}

void Agent::hear_signal(int signal) {
  const bool first = !std::exchange(interrupted_, true);
  if (first)
    peers_->announce({.kind = Failure::Kind::interrupted,
                      .node_rank = layout_.node_rank,
                      .host = layout_.here().host,
                      .exit_code = 128 + signal,
                      .signal = signal,
                      .generation = layout_.generation});
  if (stage_ == Stage::running || stage_ == Stage::noticing) {
    // Over what a progress bar, and the terminal's own ^C, have left on the line.
    if (!options_.interruption_note.empty())
      sinks_[1]->append(fmt::format("{}lockstep: {}\n", sinks_[1]->terminal() ? "\r\x1b[K" : "",
                                    options_.interruption_note));
    guardian_.signal(signal);
    enter(signal == SIGINT ? Stage::interrupted : Stage::terminated, options_.interrupt_grace);
  } else if (stage_ == Stage::interrupted) {  // they insist: no more waiting at this stage
    end_politely();
  } else if (stage_ == Stage::terminated && !first) {
    guardian_.clear();
    enter(Stage::killed, kKilling);
  } else if (stage_ == Stage::ended) {
    impatient_ = true;
  }
}

std::string Agent::name_of(int local_rank) const {
  return fmt::format("rank {} (pid {})", layout_.first_rank() + local_rank,
                     pids_[static_cast<std::size_t>(local_rank)]);
}

// Ranks that are there but do not get on. A stopped one is a failure only where the job can go on
// without it: its user may have a reason.
void Agent::watch_ranks() {
  if (stage_ != Stage::running) return;
  for (const RankWatch::Finding& finding : watch_.look(pids_, Clock::now())) {
    using Kind = RankWatch::Finding::Kind;
    if (stage_ != Stage::running) return;
    if (finding.kind == Kind::stuck) {
      Failure failure = failure_of(finding.local_rank, Failure::Kind::stuck);
      failure.step = static_cast<std::int64_t>(finding.step);
      failure.detail =
          fmt::format("no progress for {:.1f} s, at step {}",
                      std::chrono::duration<double>(finding.still_for).count(), finding.step);
      // Where everyone is, before anyone is ended.
      flight::demand_dumps(options_.flight_directory);
      fail(failure);
    } else if (finding.kind == Kind::goes_on) {
      sinks_[1]->append(fmt::format("lockstep: {} goes on\n", name_of(finding.local_rank)));
    } else if (layout_.num_restarts < layout_.max_restarts) {
      Failure failure = failure_of(finding.local_rank, Failure::Kind::stopped);
      failure.signal = SIGSTOP;
      failure.exit_code = 128 + SIGSTOP;
      fail(failure);
    } else {
      sinks_[1]->append(fmt::format("lockstep: {} is stopped, by SIGSTOP or a terminal: 'kill "
                                    "-CONT {}' on host {} lets it go "
                                    "on\n",
                                    name_of(finding.local_rank),
                                    pids_[static_cast<std::size_t>(finding.local_rank)],
                                    layout_.here().host));
    }
  }
}

void Agent::say_whom_it_waits_for() {
  told_waiting_ = true;
  std::string whom;
  for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
    if (pids_[rank] == 0) continue;
    whom += (whom.empty() ? "" : ", ") + name_of(static_cast<int>(rank));
    if (is_stopped(pids_[rank]))
      whom += fmt::format(", which is stopped ('kill -CONT {}' lets it go on)", pids_[rank]);
  }
  const double left = std::chrono::duration<double>(stage_deadline_.remaining()).count();
  sinks_[1]->append(
      fmt::format("lockstep: waiting up to {:.0f} s for {} to end\n", std::ceil(left), whom));
}

void Agent::fail(const Failure& failure) {
  if (stage_ != Stage::running) return;
  peers_->announce(failure);
  if (!explained(failure, options_.explained_exit_codes))
    sinks_[1]->append(fmt::format("lockstep: {}{}\n", failure.sentence(),
                                  num_running_ > 0 ? "; ending the others" : ""));
  enter(Stage::noticing, kNoticing);
}

void Agent::enter(Stage stage, milliseconds span) {
  stage_ = stage;
  stage_deadline_ = Deadline::after(span);
  stage_since_ = Clock::now();
  told_waiting_ = false;
}

// Ranks may have something to save.
void Agent::end_politely() {
  guardian_.signal(SIGTERM);
  enter(Stage::terminated, options_.interrupt_grace);
}

// What others have seen, or decided.
void Agent::stop_as_decided() {
  if (peers_->failure()) {
    sinks_[1]->append(
        fmt::format("lockstep: {}; ending this host's ranks\n", peers_->failure()->sentence()));
    enter(Stage::noticing, kNoticing);
  } else {
    sinks_[1]->append(fmt::format("lockstep: {}; ending the ranks to go on with all\n",
                                  peers_->decision()->reason));
    end_politely();
  }
}

void Agent::advance() {
  if (stage_ == Stage::running && (peers_->failure() || peers_->decision())) stop_as_decided();
  if (guardian_.gone()) {
    if (stage_ != Stage::ended) enter(Stage::ended, kStuckReader);
  } else if (num_running_ == 0 && stage_ < Stage::killed) {
    guardian_.clear();  // what ranks left behind ends with them
    enter(Stage::killed, kKilling);
  } else if (stage_deadline_.passed()) {
    if (stage_ == Stage::interrupted) {
      end_politely();
    } else if (stage_ == Stage::noticing) {
      const auto& failure = peers_->failure();
      const bool polite = failure && failure->kind == Failure::Kind::interrupted;
      guardian_.signal(SIGTERM);
      enter(Stage::terminated, polite ? options_.interrupt_grace : options_.grace);
    } else if (stage_ == Stage::terminated) {
      guardian_.clear();
      enter(Stage::killed, kKilling);
    } else if (stage_ == Stage::killed) {
      sinks_[1]->append("lockstep: some processes do not end: the kernel holds them\n");
      enter(Stage::ended, kStuckReader);
    }
  }
  const bool waits = stage_ == Stage::interrupted || stage_ == Stage::terminated;
  const auto silent =
      interrupted_ && !options_.interruption_note.empty() ? kSilentSave : kSilentWait;
  if (waits && !told_waiting_ && Clock::now() - stage_since_ > silent) say_whom_it_waits_for();
  if (stage_ == Stage::ended && !peers_->failure() && !peers_->decision() && !told_done_) {
    told_done_ = true;
    peers_->announce_done();
  }
}

bool Agent::streams_open() const {
  for (const RankOutput& output : outputs_)
    for (const RankStream& stream : output.streams)
      if (stream.open()) return true;
  return false;
}

bool Agent::finished() const {
  if (stage_ != Stage::ended) return false;
  if (!peers_->decision() && !peers_->all_done() && !guardian_.gone()) return false;
  if (!streams_open() && sinks_[0]->backlog() == 0 && sinks_[1]->backlog() == 0) return true;
  // All is over but for a reader who has not taken everything yet. Where the job ended well, it
  // may take its time; the user can still interrupt.
  if (impatient_) return true;
  const bool stuck = Clock::now() - last_progress_ > kStuckReader;
  return peers_->decision() && stuck && stage_deadline_.passed();
}

}  // namespace lockstep::elastic
