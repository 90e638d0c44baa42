// The processes of this host, through all generations, and which of them is which rank.
#pragma once

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/processes/guardian.h>
#include <lockstep/launch/processes/output.h>
#include <lockstep/launch/rank_side/launcher_line.h>
#include <lockstep/launch/rendezvous/messages.h>
#include <lockstep/net/fd.h>

namespace lockstep::launch {

// One process as its launcher sees it: a rank, or a spare that waits to become one.
struct RankProcess {
  static constexpr int kSpare = -1;

  int local_rank = kSpare;
  bool runs = false;
  int pid = 0;  // once it is known that it has started
  // Set by messages on its line:
  bool stays = false;    // it goes on in the next generation
  bool came_up = false;  // it has said so at some time
  bool left = false;     // it has nothing to do with the generation any more
  bool final = false;    // a restart would not help it
  Blame blame = {};      // whose loss made a group of its fail

  bool ended_well = false;
  bool to_end = false;  // it was sent a signal, or has failed: its end is no news
  bool untold = false;  // it could not be told its place, and is killed for that

  // The end of what it has written to our pipes.
  std::unique_ptr<Tail> tail = std::make_unique<Tail>();
  std::array<StreamFile, 2> files = {};  // of its standard output and error
  std::vector<RankStream> streams = {};
  net::Fd line = {};  // our end of it; none where the process has closed its own

  bool is_spare() const { return runs && local_rank == kSpare; }
  bool is_rank() const { return runs && local_rank != kSpare; }
  bool streams_open() const;
  // Reads its output that is still in the pipes.
  void drain();
  // The last lines of its output, also of streams that go to files only: standard error last.
  std::vector<std::string> last_lines(std::size_t most) const;

  // False where the process cannot hear it.
  bool say(const LineMessage& message) const;
  // The next thing that it has said, or nothing. A process that has closed its end cannot be told
  // where to go on: it does not stay.
  std::optional<LineMessage> hear();
};

// Borrows the guardian and the sinks. Not thread-safe.
class RankProcesses {
 public:
  struct Options {
    int num_ranks = 1;
    int num_spares = 0;
    std::vector<std::vector<int>> cpus;  // by local rank; empty: not pinned
    StreamChoices streams;
  };

  RankProcesses(Guardian& guardian, std::array<Sink*, 2> sinks, Options options);

  int num_slots() const { return static_cast<int>(slots_.size()); }
  RankProcess& operator[](int slot) { return slots_[static_cast<std::size_t>(slot)]; }
  const RankProcess& operator[](int slot) const { return slots_[static_cast<std::size_t>(slot)]; }
  int slot_of(const RankProcess& process) const {
    return static_cast<int>(&process - slots_.data());
  }
  // The process of a local rank; null where none runs.
  RankProcess* of_rank(int local_rank);
  // Whether the local rank had a process that has ended with exit code 0.
  bool ended_well(int local_rank) const;
  int num_ranks() const { return options_.num_ranks; }
  // How many of the ranks that run meet the condition.
  template <typename Condition>
  int count_ranks(const Condition& condition) const {
    return static_cast<int>(std::count_if(
        slots_.begin(), slots_.end(),
        [&](const RankProcess& process) { return process.is_rank() && condition(process); }));
  }

  // Describes the generation that ranks are started for.
  struct Generation {
    const RankTable& table;
    std::filesystem::path logs;  // its folder, or empty
    std::function<std::vector<std::string>(int local_rank)> environment;
  };
  // How many ranks have a process that was there before.
  struct Begun {
    int stayed = 0;
    int spares = 0;
  };
  // Gives each rank of the generation its process: the one that has stayed, or a spare that waits,
  // or else a new one. A process that cannot be told is killed: when it has ended, give_place()
  // gives the rank another.
  Begun begin(const Generation& generation);
  void give_place(int local_rank, const Generation& generation);

  // Starts spares that are missing, some time after the ranks that they would slow down.
  void tend_spares(const std::filesystem::path& logs,
                   const std::function<std::vector<std::string>()>& environment);
  // Call this when a spare reports that it waits.
  void spare_waits() { spares_lost_early_ = 0; }
  // Call this when a spare ended by itself, or could not be started. Returns false where too many
  // spares never came to wait: then no more are started.
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
  int spares_lost_early_ = 0;  // since one last came to wait
};

}  // namespace lockstep::launch
