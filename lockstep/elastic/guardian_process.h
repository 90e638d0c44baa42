// The guardian's own side; guardian.h says what it is for.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include <lockstep/elastic/guardian.h>

namespace lockstep::elastic {

// In the place of a signal number: end all ranks and what they have started.
inline constexpr int kClear = 0;

// Runs in the forked child, alone in one thread, and never returns from run().
class GuardianProcess {
 public:
  GuardianProcess(GuardianSetup setup, net::Fd channel);

  [[noreturn]] void run();

 private:
  void obey(std::int32_t command);
  void prepare(RankStart rank);
  void spawn(int local_rank);
  void reap();
  int clear();    // how many processes are left: the kernel holds them
  bool listen();  // false once the launcher has vanished
  void report(Guardian::Event event);
  [[noreturn]] void leave();

  GuardianSetup setup_;
  net::Fd channel_;
  net::Fd children_;                 // a signalfd
  std::vector<RankStart> prepared_;  // by local rank, until all have come
  std::vector<pid_t> pids_;          // by local rank; 0 where not running
};

}  // namespace lockstep::elastic
