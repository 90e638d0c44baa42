// The guardian: a small process between the launcher and its ranks. It starts the ranks, as often
// as the job is formed, and tells how each of them ended, and when the launcher vanishes, even by
// kill -9, it ends everything that descends from them. When the guardian itself vanishes, the
// kernel kills the ranks, and the launcher inherits and ends the rest.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/net/fd.h>

namespace lockstep::elastic {

// What all ranks of a local rank are started with, of whatever generation.
struct GuardianSetup {
  std::vector<std::string> command;
  std::vector<std::vector<int>> cpus;  // by local rank: pinned to these; empty: not pinned
  std::string flight_directory;        // removed at the end where it is empty
};

// What one of them is started with besides.
struct RankStart {
  std::vector<std::string> variables;  // "NAME=value", over the launcher's own
  net::Fd standard_output;
  net::Fd standard_error;
};

// The launcher's side. Not thread-safe.
class Guardian {
 public:
  struct Event {
    enum class Kind : std::int32_t { started, spawn_failed, ended, cleared };
    Kind kind = Kind::started;
    std::int32_t local_rank = 0;  // of all but cleared
    std::int32_t value = 0;       // pid; errno; wait status; how many processes the kernel holds
  };

  // Forks, so the process must not have threads yet.
  explicit Guardian(GuardianSetup setup);
  ~Guardian();  // ends all, as when the launcher vanishes

  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  // Starts one for each local rank. None may be left of those before: see clear(). The descriptors
  // are then only the guardian's, and once all have started only the ranks'.
  void start_ranks(std::vector<RankStart> ranks);

  // Sends a signal to the process group of every rank that has not ended.
  void signal(int signal);

  // Ends all ranks and all they have started; `cleared` follows.
  void clear();

  // Readable when there is an event.
  int fd() const { return channel_.get(); }

  // The next event; nothing where none is waiting.
  std::optional<Event> next();

  // True where somebody killed it.
  bool gone() const { return gone_; }

 private:
  pid_t pid_ = -1;
  net::Fd channel_;
  bool gone_ = false;
};

}  // namespace lockstep::elastic
