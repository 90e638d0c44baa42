// The guardian's own side; guardian.h says what it is for.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include <lockstep/elastic/guardian.h>

namespace lockstep::elastic {

// In the place of a signal number: end everything and leave.
inline constexpr int kFinish = 0;

// Runs in the forked child, alone in one thread, and never returns from run().
class GuardianProcess {
 public:
  GuardianProcess(GuardianSetup setup, net::Fd channel);

  [[noreturn]] void run();

 private:
  void receive_variables();
  void spawn(int local_rank);
  void reap();
  bool obey();  // false once there is nothing more to obey
  void report(Guardian::Event event);
  [[noreturn]] void leave();

  GuardianSetup setup_;
  net::Fd channel_;
  net::Fd children_;                                 // a signalfd
  std::vector<std::vector<std::string>> variables_;  // by local rank
  std::vector<pid_t> pids_;                          // by local rank; 0 where not running
};

}  // namespace lockstep::elastic
