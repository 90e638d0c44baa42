#include <lockstep/elastic/processes.h>

#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/elastic/cores.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

namespace {

// Whether what is typed at the terminal is meant for this job. Ranks have no terminal of their own
// that would stop them when they read it in the background: they would take what is typed from the
// shell.
bool in_foreground() { return ::tcgetpgrp(STDIN_FILENO) == ::getpgrp(); }

// By then ranks have begun their work, which starting a process would slow down.
constexpr milliseconds kBeforeSpares(2000);
// A spare that was lost is replaced sooner: ranks are at work by then.
constexpr milliseconds kAfterALoss(500);
// A program that ends when it is to wait will do so again.
constexpr int kMostLostEarly = 5;

}  // namespace

Processes::Processes(Guardian& guardian, std::array<Sink*, 2> sinks, Options options)
    : guardian_(guardian),
      sinks_(sinks),
      options_(std::move(options)),
      colour_(!environment_variable("NO_COLOR")),
      slots_(static_cast<std::size_t>(options_.num_ranks + options_.num_spares)),
      next_spare_(Clock::now()) {}

RankProcess* Processes::of_rank(int local_rank) {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const RankProcess& one) {
    return one.runs && one.local_rank == local_rank;
  });
  return found == slots_.end() ? nullptr : &*found;
}

bool Processes::ended_well(int local_rank) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const RankProcess& one) {
    return !one.runs && one.local_rank == local_rank && one.ended_well;
  });
}

int Processes::free_slot() const {
  const auto found =
      std::find_if(slots_.begin(), slots_.end(), [](const RankProcess& one) { return !one.runs; });
  LOCKSTEP_CHECK(found != slots_.end(), "{} processes run", slots_.size());
  return static_cast<int>(found - slots_.begin());
}

RankStart Processes::make(int slot, int local_rank, const fs::path& folder,
                          const std::string& prefix, std::vector<std::string> variables) {
  RankProcess& process = (*this)[slot];
  process = {.local_rank = local_rank, .runs = true};
  std::array<Plumbing, 2> pipes = lay_streams(folder, local_rank, options_.streams);
  const bool alone = options_.num_ranks + options_.num_spares == 1;
  for (std::size_t i = 0; i < pipes.size(); ++i)
    if (pipes[i].our_end)
      process.streams.emplace_back(std::move(pipes[i].our_end), prefix, *sinks_[i],
                                   alone || sinks_[i]->terminal() ? RankStream::Incomplete::shown
                                                                  : RankStream::Incomplete::held,
                                   process.tail.get(), std::move(pipes[i].copy));
  LineEnds line = make_line();
  process.line = std::move(line.ours);
  RankStart start{.slot = slot,
                  .variables = std::move(variables),
                  .cpus = {},
                  .standard_output = std::move(pipes[0].rank_end),
                  .standard_error = std::move(pipes[1].rank_end),
                  .line = std::move(line.theirs)};
  if (local_rank != RankProcess::kSpare && !options_.cpus.empty())
    start.cpus = options_.cpus[static_cast<std::size_t>(local_rank)];
  return start;
}

RankProcess* Processes::take_spare(int local_rank) {
  const auto waiting = std::find_if(slots_.begin(), slots_.end(), [](const RankProcess& one) {
    return one.is_spare() && one.stays;
  });
  if (waiting == slots_.end()) return nullptr;
  waiting->local_rank = local_rank;
  if (!options_.cpus.empty())
    pin(waiting->pid, options_.cpus[static_cast<std::size_t>(local_rank)]);
  return &*waiting;
}

// A new one is put to `starts`.
void Processes::find_process(int local_rank, const Generation& generation, Begun& begun,
                             std::vector<RankStart>& starts) {
  const Layout& layout = generation.layout;
  const std::string prefix = line_prefix(layout.first_rank() + local_rank, layout.world_size(),
                                         colour_ && sinks_[0]->terminal());
  RankProcess* process = of_rank(local_rank);
  int& kind = process != nullptr ? begun.stayed : begun.spares;
  if (process == nullptr && (process = take_spare(local_rank)) == nullptr) {
    starts.push_back(make(free_slot(), local_rank, generation.logs / std::to_string(local_rank),
                          prefix, generation.environment(local_rank)));
    starts.back().reads_terminal = layout.first_rank() + local_rank == 0 && in_foreground();
    return;
  }
  for (RankStream& stream : process->streams) stream.set_prefix(prefix);
  process->left = false;
  process->final = false;
  process->blame = {};
  LineMessage place{.word = LineMessage::Word::place,
                    .variables = generation.environment(local_rank)};
  place.variables.emplace_back("LOCKSTEP_SPARE=");
  // It would wait for its place for ever, and the other ranks for it.
  process->untold = process->to_end = !process->say(place);
  if (process->untold)
    guardian_.signal(slot_of(*process), SIGKILL);
  else
    ++kind;
}

Processes::Begun Processes::begin(const Generation& generation) {
  Begun begun;
  std::vector<RankStart> starts;
  for (RankProcess& one : slots_) one.ended_well = false;
  for (int rank = 0; rank < options_.num_ranks; ++rank)
    find_process(rank, generation, begun, starts);
  if (!starts.empty()) guardian_.start(starts);
  next_spare_ = Clock::now() + kBeforeSpares;
  return begun;
}

void Processes::give_place(int local_rank, const Generation& generation) {
  Begun begun;
  std::vector<RankStart> starts;
  find_process(local_rank, generation, begun, starts);
  if (!starts.empty()) guardian_.start(starts);
}

void Processes::tend_spares(const fs::path& logs,
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

bool Processes::lost_spare(const RankProcess& process) {
  next_spare_ = std::max(next_spare_, Clock::now() + kAfterALoss);
  return process.came_up || ++spares_lost_early_ != kMostLostEarly;
}

}  // namespace lockstep::elastic
