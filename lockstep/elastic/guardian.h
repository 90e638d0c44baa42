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

struct GuardianCommand;

// What all processes are started with.
struct GuardianSetup {
  std::vector<std::string> command;
  int num_slots = 1;             // how many may run at once
  std::string flight_directory;  // removed at the end where there is no dump in it
};

// What one of them is started with besides.
struct RankStart {
  int slot = 0;                        // one in which nothing runs
  std::vector<std::string> variables;  // "NAME=value", over the launcher's own
  std::vector<int> cpus;               // pinned to these; empty: not pinned
  net::Fd standard_output;
  net::Fd standard_error;
  net::Fd line;  // its end of it, as LOCKSTEP_LINE_FD
  bool reads_terminal =
      false;  // where that is the launcher's standard input; the others read nothing
};

// The launcher's side. Not thread-safe.
class Guardian {
 public:
  struct Event {
    enum class Kind : std::int32_t { started, spawn_failed, ended, swept, cleared };
    Kind kind = Kind::started;
    std::int32_t slot = 0;   // of the first three
    std::int32_t value = 0;  // pid; errno; wait status; how many processes the kernel holds
  };

  // Forks, so the process must not have threads yet.
  explicit Guardian(GuardianSetup setup);
  ~Guardian();  // ends all, as when the launcher vanishes

  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  // The descriptors are then only the guardian's, and once all have started only the ranks'.
  void start(const std::vector<RankStart>& ranks);

  // Sends a signal to the process group of what runs in the slot.
  void signal(int slot, int signal);

  // Ends what those have started that have ended; `swept` follows.
  void sweep();

  // Ends all ranks and all they have started; `cleared` follows.
  void clear();

  // Readable when there is an event.
  int fd() const { return channel_.get(); }

  // The next event; nothing where none is waiting.
  std::optional<Event> next();

  // True where somebody killed it.
  bool gone() const { return gone_; }

 private:
  void command(const GuardianCommand& command);

  pid_t pid_ = -1;
  net::Fd channel_;
  bool gone_ = false;
};

}  // namespace lockstep::elastic
