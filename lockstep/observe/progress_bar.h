// The live progress of a run on somebody's terminal, or in a log.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include <lockstep/observe/progress_display.h>

namespace lockstep::observe {

// On a terminal, one line that is redrawn in place, at most ten times a second, and always fits:
//
//   step  340/1000  ━━━━━━━━╸━━━━━━━━   34%  loss 1.872 ↓  val 1.901  41.2k tok/s  left 1:52
//
// Elsewhere (a log file, CI, a launcher's pipe), a plain line now and then.
//
// Ownership: the descriptor stays the caller's, and open. Threading: any thread. Failure: a stream
// that takes nothing for now (Ctrl-S, a slow reader) loses redraws and, later, notes; one that is
// gone loses everything. Neither is an error, and nothing ever waits for it, so that no rank is
// late because of a terminal.
class ProgressBar {
 public:
  enum class Terminal : std::uint8_t { automatic, never, always };

  struct Options {
    std::int64_t total_steps = 0;
    std::string rate_unit = "tok/s";
    Terminal terminal = Terminal::automatic;
    int width = 0;  // 0 asks the terminal, each time
    milliseconds plain_interval{10'000};
    std::int64_t plain_every_steps = 0;
  };

  ProgressBar(int fd, const Options& options);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(const Progress& progress);
  // A line above the bar.
  void note(std::string_view text);
  // Leaves the bar as it is in the end, with the cursor on a new line. The destructor does it, too.
  void finish();

 private:
  int width() const;
  void put(std::string_view text);

  std::mutex mutex_;
  int fd_;
  int own_fd_ = -1;  // the same stream opened anew, where its blocking mode is not ours to change
  bool lost_ = false;
  int width_;
  std::string pending_;  // what the stream has not taken yet
  ProgressDisplay display_;
};

}  // namespace lockstep::observe
