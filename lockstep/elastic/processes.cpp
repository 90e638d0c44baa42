#include <lockstep/elastic/processes.h>

#include <algorithm>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/elastic/cores.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

namespace {

// By then ranks have begun their work, which starting a process would slow down.
constexpr milliseconds kBeforeSpares(2000);
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
  for (std::size_t i = 0; i < pipes.size(); ++i)
    if (pipes[i].our_end)
      process.streams.emplace_back(std::move(pipes[i].our_end), prefix, sinks_[i],
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

Processes::Begun Processes::begin(
    const Layout& layout, const fs::path& logs,
    const std::function<std::vector<std::string>(int local_rank)>& environment) {
  Begun begun;
  std::vector<RankStart> starts;
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    const std::string prefix = line_prefix(layout.first_rank() + rank, layout.world_size(),
                                           colour_ && sinks_[0]->terminal());
    RankProcess* process = of_rank(rank);
    if (process != nullptr) {
      ++begun.stayed;
    } else if ((process = take_spare(rank)) != nullptr) {
      ++begun.spares;
    } else {
      starts.push_back(
          make(free_slot(), rank, logs / std::to_string(rank), prefix, environment(rank)));
      continue;
    }
    for (RankStream& stream : process->streams) stream.set_prefix(prefix);
    process->left = false;
    process->final = false;
    process->to_end = false;
    LineMessage place{.word = LineMessage::Word::place, .variables = environment(rank)};
    place.variables.emplace_back("LOCKSTEP_SPARE=");
    process->say(place);
  }
  if (!starts.empty()) guardian_.start(starts);
  next_spare_ = Clock::now() + kBeforeSpares;
  return begun;
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
  next_spare_ = Clock::now() + kBeforeSpares;
  return process.came_up || ++spares_lost_early_ != kMostLostEarly;
}

}  // namespace lockstep::elastic
