// The processes of this host, through all generations: which of them is which rank.
#pragma once

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/guardian.h>
#include <lockstep/elastic/layout.h>
#include <lockstep/elastic/output.h>
#include <lockstep/elastic/rank_process.h>
#include <lockstep/elastic/rank_streams.h>

namespace lockstep::elastic {

// Borrows the guardian and the sinks. Not thread-safe.
class Processes {
 public:
  struct Options {
    int num_ranks = 1;
    int num_spares = 0;
    std::vector<std::vector<int>> cpus;  // by local rank; empty: not pinned
    StreamChoices streams;
  };

  Processes(Guardian& guardian, std::array<Sink*, 2> sinks, Options options);

  int num_slots() const { return static_cast<int>(slots_.size()); }
  RankProcess& operator[](int slot) { return slots_[static_cast<std::size_t>(slot)]; }
  const RankProcess& operator[](int slot) const { return slots_[static_cast<std::size_t>(slot)]; }
  int slot_of(const RankProcess& process) const {
    return static_cast<int>(&process - slots_.data());
  }
  // Of a local rank; null where it has none that runs.
  RankProcess* of_rank(int local_rank);
  // Whether it had one that has ended with exit code 0.
  bool ended_well(int local_rank) const;
  int num_ranks() const { return options_.num_ranks; }
  // Of those that run, how many meet the condition.
  template <typename Condition>
  int count_ranks(const Condition& condition) const {
    return static_cast<int>(std::count_if(
        slots_.begin(), slots_.end(),
        [&](const RankProcess& process) { return process.is_rank() && condition(process); }));
  }

  // What the ranks of a generation are started with.
  struct Generation {
    const Layout& layout;
    std::filesystem::path logs;  // its folder, or empty
    std::function<std::vector<std::string>(int local_rank)> environment;
  };
  // Gives each rank of the generation its process: the one that has stayed, or a spare that waits,
  // or else a new one. One that cannot be told is killed: when it has ended, give_place() gives the
  // rank another. How many ranks have a process that was there before:
  struct Begun {
    int stayed = 0;
    int spares = 0;
  };
  Begun begin(const Generation& generation);
  void give_place(int local_rank, const Generation& generation);

  // Starts spares that are missing: some time after what they would compete with.
  void tend_spares(const std::filesystem::path& logs,
                   const std::function<std::vector<std::string>()>& environment);
  // One of them says that it waits.
  void spare_waits() { spares_lost_early_ = 0; }
  // One of them ended by itself, or could not be started. False where it is the last of so many
  // that never came to wait that no more are started.
  bool lost_spare(const RankProcess& process);

 private:
  int free_slot() const;
  RankProcess* take_spare(int local_rank);  // null where none waits
  void find_process(int local_rank, const Generation& generation, Begun& begun,
                    std::vector<RankStart>& starts);
  RankStart make(int slot, int local_rank, const std::filesystem::path& folder,
                 const std::string& prefix, std::vector<std::string> variables);

  Guardian& guardian_;
  const std::array<Sink*, 2> sinks_;
  const Options options_;
  const bool colour_;
  std::vector<RankProcess> slots_;
  Clock::time_point next_spare_;
  int spares_lost_early_ = 0;  // since one came to wait
};

}  // namespace lockstep::elastic
