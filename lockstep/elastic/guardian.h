// The guardian: a small process between the launcher and its ranks. It starts the ranks and tells
// how each of them ended, and when the launcher vanishes, even by kill -9, it ends everything that
// descends from them. When the guardian itself vanishes, the kernel kills the ranks, and the
// launcher inherits and ends the rest.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/net/fd.h>

namespace lockstep::elastic {

// What a rank is started with, as far as it is known before the launchers have met.
struct RankSetup {
  net::Fd standard_output;
  net::Fd standard_error;
  std::vector<int> cpus;  // pinned to these; empty: not pinned
};

struct GuardianSetup {
  std::vector<std::string> command;
  std::vector<RankSetup> ranks;  // by local rank
  std::string flight_directory;  // removed at the end where it is empty
};

// The launcher's side. Not thread-safe.
class Guardian {
 public:
  struct Event {
    enum class Kind : std::int32_t { started, spawn_failed, ended };
    Kind kind = Kind::started;
    std::int32_t local_rank = 0;
    std::int32_t value = 0;  // pid; errno; wait status
  };

  // Forks, so the process must not have threads yet. Takes the setup over: the descriptors in it
  // are then only the guardian's.
  explicit Guardian(GuardianSetup setup);
  ~Guardian();  // ends all, as when the launcher vanishes

  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  // Starts the ranks, each with these variables ("NAME=value") over the launcher's own.
  void start_ranks(const std::vector<std::vector<std::string>>& variables);

  // Sends a signal to the process group of every rank that has not ended.
  void signal(int signal);

  // Ends all ranks and all they have started; gone() follows.
  void finish();

  // Readable when there is an event.
  int fd() const { return channel_.get(); }

  // The next event; nothing where none is waiting.
  std::optional<Event> next();

  // True once it has ended everything and itself.
  bool gone() const { return gone_; }

  // True where it was gone before it was told to finish.
  bool failed() const { return gone_ && !finishing_; }

 private:
  pid_t pid_ = -1;
  net::Fd channel_;
  bool finishing_ = false;
  bool gone_ = false;
};

}  // namespace lockstep::elastic
