#include <lockstep/launch/processes/rank_processes.h>

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/processes/rank_setup.h>

namespace lockstep::launch {

namespace fs = std::filesystem;

bool RankProcess::streams_open() const {
  return std::any_of(streams.begin(), streams.end(),
                     [](const RankStream& stream) { return stream.open(); });
}

void RankProcess::drain() {
  for (RankStream& stream : streams)
    while (stream.open() && !stream.held_back() && stream.read()) {
    }
}

std::vector<std::string> RankProcess::last_lines(std::size_t most) const {
  const auto& [output, error] = files;
  Tail all;
  if (output.by_rank) all.append_end_of(output.path);
  all.append(tail->text());
  if (error.by_rank) all.append_end_of(error.path);
  return all.lines(most);
}

bool RankProcess::say(const LineMessage& message) const {
  const std::string packet = message.encode();
  return ::send(line.get(), packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(packet.size());
}

std::optional<LineMessage> RankProcess::hear() {
  if (!line) return std::nullopt;
  std::array<char, 4096> packet;
  ssize_t got = ::recv(line.get(), packet.data(), packet.size(), MSG_DONTWAIT);
  // The process ended without reading all of our messages. Its own messages come after that error.
  if (got < 0 && errno == ECONNRESET)
    got = ::recv(line.get(), packet.data(), packet.size(), MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
    line.reset();
    stays = false;
  }
  if (got <= 0) return std::nullopt;
  return LineMessage::decode({packet.data(), static_cast<std::size_t>(got)});
}

namespace {

// Whether the launcher's standard input is meant for this job: a pipe or a file always is, and a
// terminal is while the launcher is in the foreground. Ranks have no terminal of their own that
// would stop them when they read in the background: they would take what is typed from the shell.
bool input_is_ours() {
  return ::isatty(STDIN_FILENO) == 0 || ::tcgetpgrp(STDIN_FILENO) == ::getpgrp();
}

// Spares are started so long after the ranks, which starting a process would slow down.
constexpr milliseconds kBeforeSpares(2000);
// A lost spare is replaced sooner: ranks are at work by then.
constexpr milliseconds kAfterALoss(500);
// A program that ends instead of waiting will do so again.
constexpr int kMostLostEarly = 5;

}  // namespace

RankProcesses::RankProcesses(Guardian& guardian, std::array<Sink*, 2> sinks, Options options)
    : guardian_(guardian),
      sinks_(sinks),
      options_(std::move(options)),
      colour_(!environment_variable("NO_COLOR")),
      slots_(static_cast<std::size_t>(options_.num_ranks + options_.num_spares)),
      next_spare_(Clock::now()) {}

RankProcess* RankProcesses::of_rank(int local_rank) {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const RankProcess& one) {
    return one.runs && one.local_rank == local_rank;
  });
  return found == slots_.end() ? nullptr : &*found;
}

bool RankProcesses::ended_well(int local_rank) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const RankProcess& one) {
    return !one.runs && one.local_rank == local_rank && one.ended_well;
  });
}

int RankProcesses::free_slot() const {
  const auto found =
      std::find_if(slots_.begin(), slots_.end(), [](const RankProcess& one) { return !one.runs; });
  LOCKSTEP_CHECK(found != slots_.end(), "{} processes run", slots_.size());
  return static_cast<int>(found - slots_.begin());
}

RankStart RankProcesses::make(int slot, int local_rank, const fs::path& folder,
                              const std::string& prefix, std::vector<std::string> variables) {
  RankProcess& process = (*this)[slot];
  process = {.local_rank = local_rank, .runs = true};
  std::array<Plumbing, 2> pipes = lay_streams(folder, local_rank, options_.streams);
  const bool alone = options_.num_ranks + options_.num_spares == 1;
  for (std::size_t i = 0; i < pipes.size(); ++i) {
    process.files[i] = std::move(pipes[i].file);
    if (pipes[i].our_end)
      process.streams.emplace_back(std::move(pipes[i].our_end), prefix, *sinks_[i],
                                   alone || sinks_[i]->terminal() ? RankStream::Incomplete::shown
                                                                  : RankStream::Incomplete::held,
                                   process.tail.get(), std::move(pipes[i].copy));
  }
  auto [ours, theirs] = packet_sockets();
  process.line = std::move(ours);
  RankStart start{.slot = slot,
                  .variables = std::move(variables),
                  .cpus = {},
                  .standard_output = std::move(pipes[0].rank_end),
                  .standard_error = std::move(pipes[1].rank_end),
                  .line = std::move(theirs)};
  if (local_rank != RankProcess::kSpare && !options_.cpus.empty())
    start.cpus = options_.cpus[static_cast<std::size_t>(local_rank)];
  return start;
}

RankProcess* RankProcesses::take_spare(int local_rank) {
  const auto waiting = std::find_if(slots_.begin(), slots_.end(), [](const RankProcess& one) {
    return one.is_spare() && one.stays;
  });
  if (waiting == slots_.end()) return nullptr;
  waiting->local_rank = local_rank;
  if (!options_.cpus.empty())
    pin(waiting->pid, options_.cpus[static_cast<std::size_t>(local_rank)]);
  return &*waiting;
}

// A process that has to be started is added to `starts`.
void RankProcesses::find_process(int local_rank, const Generation& generation, Begun& begun,
                                 std::vector<RankStart>& starts) {
  const RankTable& table = generation.table;
  const std::string prefix = line_prefix(table.first_rank() + local_rank, table.world_size(),
                                         colour_ && sinks_[0]->terminal());
  RankProcess* process = of_rank(local_rank);
  int& kind = process != nullptr ? begun.stayed : begun.spares;
  if (process == nullptr && (process = take_spare(local_rank)) == nullptr) {
    starts.push_back(make(free_slot(), local_rank, generation.logs / std::to_string(local_rank),
                          prefix, generation.environment(local_rank)));
    starts.back().reads_input = table.first_rank() + local_rank == 0 && input_is_ours();
    return;
  }
  for (RankStream& stream : process->streams) stream.set_prefix(prefix);
  process->left = false;
  process->final = false;
  process->blame = {};
  LineMessage place{.word = LineMessage::Word::place,
                    .variables = generation.environment(local_rank)};
  place.variables.emplace_back("LOCKSTEP_SPARE=");
  // A process that cannot be told would wait for its place for ever, and the other ranks for it.
  process->untold = process->to_end = !process->say(place);
  if (process->untold)
    guardian_.signal(slot_of(*process), SIGKILL);
  else
    ++kind;
}

RankProcesses::Begun RankProcesses::begin(const Generation& generation) {
  Begun begun;
  std::vector<RankStart> starts;
  for (RankProcess& one : slots_) one.ended_well = false;
  for (int rank = 0; rank < options_.num_ranks; ++rank)
    find_process(rank, generation, begun, starts);
  if (!starts.empty()) guardian_.start(starts);
  next_spare_ = Clock::now() + kBeforeSpares;
  return begun;
}

void RankProcesses::give_place(int local_rank, const Generation& generation) {
  Begun begun;
  std::vector<RankStart> starts;
  find_process(local_rank, generation, begun, starts);
  if (!starts.empty()) guardian_.start(starts);
}

void RankProcesses::tend_spares(const fs::path& logs,
                                const std::function<std::vector<std::string>()>& environment) {
  if (options_.num_spares == 0 || spares_lost_early_ >= kMostLostEarly ||
      Clock::now() < next_spare_)
    return;
  const auto spares = std::count_if(slots_.begin(), slots_.end(),
                                    [](const RankProcess& one) { return one.is_spare(); });
  if (spares >= options_.num_spares) return;
  const int slot = free_slot();
  std::vector<RankStart> starts;
  starts.push_back(make(slot, RankProcess::kSpare, logs / fmt::format("spare_{}", slot), "[spare] ",
                        environment()));
  guardian_.start(starts);
}

bool RankProcesses::lost_spare(const RankProcess& process) {
  next_spare_ = std::max(next_spare_, Clock::now() + kAfterALoss);
  return process.came_up || ++spares_lost_early_ != kMostLostEarly;
}

}  // namespace lockstep::launch
