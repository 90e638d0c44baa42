// A process of this host as its launcher sees it: a rank, or a spare that waits to become one.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <lockstep/base/launcher_line.h>
#include <lockstep/elastic/output.h>
#include <lockstep/net/fd.h>

namespace lockstep::elastic {

struct RankProcess {
  static constexpr int kSpare = -1;

  int local_rank = kSpare;
  bool runs = false;
  int pid = 0;           // once it is known that it has started
  bool stays = false;    // goes on in the next generation, as it has said
  bool came_up = false;  // has said so at some time
  bool left = false;     // has nothing to do with the generation any more
  bool final = false;    // its failure is not to be helped by a restart, as it has said
  Blame blame = {};      // whose loss a group of its failed of, as it has said

  bool ended_well = false;
  bool to_end = false;  // was sent a signal, or has failed: that it ends is no news
  bool untold = false;  // could not be told its place, and is killed for that

  // Everything that is read of it.
  std::unique_ptr<Tail> tail = std::make_unique<Tail>();
  std::vector<RankStream> streams = {};
  net::Fd line = {};  // our end of it; none where the process has closed its own

  bool is_spare() const { return runs && local_rank == kSpare; }
  bool is_rank() const { return runs && local_rank != kSpare; }
  bool streams_open() const;
  // What it wrote that is still in the pipes.
  void drain();

  // False where it cannot hear it.
  bool say(const LineMessage& message) const;
  // What it has said; nothing where there is nothing new. One that has closed its end cannot be
  // told where to go on: it does not stay.
  std::optional<LineMessage> hear();
};

// Both ends of a line; the second is for the process.
struct LineEnds {
  net::Fd ours;
  net::Fd theirs;
};
LineEnds make_line();

}  // namespace lockstep::elastic
