// The guardian: a small process between the launcher and its ranks. It starts the ranks, as often
// as the job is formed, and tells how each of them ended. When the launcher vanishes, even by
// kill -9, it ends everything that descends from them. When the guardian itself vanishes, the
// kernel kills the ranks, and the launcher inherits and ends the rest.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/net/fd.h>

namespace lockstep::launch {

struct GuardianCommand;

// Common to all processes that the guardian starts.
struct GuardianSetup {
  std::vector<std::string> command;
  int num_slots = 1;             // how many may run at once
  std::string flight_directory;  // removed at the end unless there is a dump in it
};

// One process to start.
struct RankStart {
  int slot = 0;                        // one in which nothing runs
  std::vector<std::string> variables;  // "NAME=value", over the launcher's own
  std::vector<int> cpus;               // pinned to these; empty: not pinned
  net::Fd standard_output;
  net::Fd standard_error;
  net::Fd line;              // the process's end of its line, as LOCKSTEP_LINE_FD
  bool reads_input = false;  // it has the launcher's standard input; all others read nothing
};

// The launcher's side. Not thread-safe.
class Guardian {
 public:
  struct Event {
    enum class Kind : std::int32_t { started, spawn_failed, ended, swept, cleared };
    Kind kind = Kind::started;
    std::int32_t slot = 0;  // with the first three
    // The pid; the errno; the wait status; and with the last two, how many processes do not end
    // because the kernel holds them.
    std::int32_t value = 0;
  };

  // Forks, so the process must not have threads yet.
  explicit Guardian(GuardianSetup setup);
  ~Guardian();  // ends all, as when the launcher vanishes

  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  // Hands the descriptors over to the guardian, and once all have started only the ranks hold them.
  void start(const std::vector<RankStart>& ranks);

  // Sends a signal to the process group of the rank in the slot.
  void signal(int slot, int signal);

  // Ends what the processes that have ended left behind; `swept` follows.
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

// Two connected sockets that keep the boundaries of packets. UsageError where none can be had.
std::pair<net::Fd, net::Fd> packet_sockets();

// From now on, a descendant whose parent dies becomes a child of this process, whatever session or
// process group it moved to.
void adopt_orphans();

// Kills the children of this process with SIGKILL, then the children that it inherits from them,
// until only the spared ones are left, with their own descendants. Returns the processes that still
// exist at the deadline (stuck inside the kernel).
std::vector<pid_t> kill_descendants(const Deadline& deadline,
                                    const std::vector<pid_t>& spared = {});

}  // namespace lockstep::launch
