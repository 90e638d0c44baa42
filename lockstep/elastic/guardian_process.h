// The guardian's own side; guardian.h says what it is for.
#pragma once

#include <sys/types.h>

#include <array>
#include <string>
#include <vector>

#include <lockstep/elastic/guardian.h>

namespace lockstep::elastic {

// What the launcher asks for, other than a start.
struct GuardianCommand {
  enum class Kind : std::int32_t { signal, sweep, clear };
  Kind kind = Kind::signal;
  std::int32_t slot = 0;    // of signal
  std::int32_t signal = 0;  // its number
};

// What stands before the variables of a rank to be started; its descriptors come along.
struct StartHeader {
  std::int32_t slot = 0;
  std::int32_t last = 1;  // of those that are to be started together
  std::int32_t num_cpus = 0;
  std::int32_t reads_terminal = 0;
};

// Standard output, standard error and the line.
inline constexpr std::size_t kRankDescriptors = 3;

// Runs in the forked child, alone in one thread, and never returns from run().
class GuardianProcess {
 public:
  GuardianProcess(GuardianSetup setup, net::Fd channel);

  [[noreturn]] void run();

 private:
  void obey(const GuardianCommand& command);
  void prepare(std::string_view packet, const std::array<int, kRankDescriptors>& descriptors);
  void spawn(const RankStart& rank);
  void reap();
  int sweep();    // how many processes are left: the kernel holds them
  int clear();    // likewise
  bool listen();  // false once the launcher has vanished
  void report(Guardian::Event event);
  [[noreturn]] void leave();

  GuardianSetup setup_;
  net::Fd channel_;
  net::Fd children_;                 // a signalfd
  std::vector<RankStart> prepared_;  // until all have come that are to be started together
  std::vector<pid_t> pids_;          // by slot; 0 where nothing runs
};

}  // namespace lockstep::elastic
