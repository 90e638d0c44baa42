// The live progress of a run on a terminal or in a log: the text of a line (bar_line, plain_line),
// what to write when (ProgressDisplay), and the stream it is written to (ProgressBar).
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include <lockstep/base/deadline.h>
#include <lockstep/observe/terminal.h>

namespace lockstep::observe {

struct Progress {
  std::int64_t step = 0;  // steps that are done
  double loss = std::numeric_limits<double>::quiet_NaN();
  std::optional<double> validation_loss;  // the latest one
  double rate = 0;                        // tokens or samples a second; 0 where it is not known
  std::optional<double> share_of_peak;    // the devices' speed as a share of their peak (MFU)
  std::optional<double> memory_bytes;     // the most that tensors took on the device so far
  // If it is not given, the bar estimates it from the speed of the last steps.
  std::optional<double> seconds_left;
};

enum class Trend : std::uint8_t { unknown, falling, rising };

// The parts of a line that are not in Progress.
struct ProgressContext {
  std::int64_t total_steps = 0;
  std::string rate_unit = "tok/s";
  Trend loss_trend = Trend::unknown;
  std::optional<double> seconds_taken;  // once the run is over, in place of the time left
};

struct LineStyle {
  int width = 80;
  Characters characters = Characters::ascii;
  Colour colour = Colour::none;
};

// A line with a bar for a terminal: at most width - 1 columns, so that no terminal wraps it.
// Fields that do not fit are left out, the least important first.
std::string bar_line(const Progress& progress, const ProgressContext& context,
                     const LineStyle& style);

// A line for a log: no bar, no padding, no limit.
std::string plain_line(const Progress& progress, const ProgressContext& context);

// "1:52", "2:03:40", "3d 04h".
std::string format_span(double seconds);

// Three significant digits and a unit: "41.2k".
std::string format_rate(double rate);

// "25.8 GiB", "310 MiB".
std::string format_bytes(double bytes);

// Four significant digits: "1.872", "12.35", "1234".
std::string format_loss(double loss);

// A moving rate: amounts and the time they took fade alike, by 1/e in `memory`, and the rate is
// their ratio. So it is exact from the first amount on where the rate is constant, and follows a
// change within the memory. Time points are passed in. Threading: one thread. Failure: none.
class Throughput {
 public:
  explicit Throughput(std::chrono::duration<double> memory) : memory_(memory) {}

  // Time counts from now on. Earlier amounts are kept: call this after a pause to leave it out.
  void start(Clock::time_point now) { last_ = now; }

  // Adds what was done since start() or the last add().
  void add(double amount, Clock::time_point now) {
    const std::chrono::duration<double> span = std::max(now - last_, Clock::duration::zero());
    last_ = now;
    const double fade = std::exp(-span / memory_);
    amount_ = amount_ * fade + amount;
    seconds_ = seconds_ * fade + span.count();
  }

  // 0 before the first amount.
  double per_second() const { return seconds_ > 0 ? amount_ / seconds_ : 0; }

 private:
  std::chrono::duration<double> memory_;
  Clock::time_point last_;
  double amount_ = 0;
  double seconds_ = 0;
};

enum class DisplayKind : std::uint8_t { live, plain };

// Turns progress into bytes for a terminal or a log; the owner of the stream writes them, whole and
// in order. A live bar leaves the cursor at the start of its line. The next frame erases all of the
// bar, even where the terminal became narrower and broke the line into several.
//
// Threading: one thread. Failure: memory only.
class ProgressDisplay {
 public:
  struct Options {
    std::int64_t total_steps = 0;
    std::string rate_unit = "tok/s";
    DisplayKind kind = DisplayKind::plain;
    Characters characters = Characters::ascii;
    Colour colour = Colour::none;
    milliseconds redraw_interval{100};
    // A log gets a line for the first step, one for the last, and one between them whenever this
    // much time has passed, or, if plain_every_steps is not 0, after so many steps instead.
    milliseconds plain_interval{10'000};
    std::int64_t plain_every_steps = 0;
  };

  ProgressDisplay(Options options, Clock::time_point start);

  // Each of these returns the bytes to write, which may be none.
  std::string update(const Progress& progress, int width, Clock::time_point now);
  // Lines of text above the bar.
  std::string note(std::string_view text, int width);
  // The final bar and a new line. Later calls return nothing.
  std::string finish(int width, Clock::time_point now);

 private:
  bool due(Clock::time_point now) const;
  void follow_loss(double loss);
  std::string_view erase(int width) const;
  std::string draw(int width);

  Options options_;
  ProgressContext context_;
  Clock::time_point start_;
  Throughput steps_;
  std::optional<Progress> latest_;
  std::optional<std::int64_t> shown_step_;
  Clock::time_point shown_at_;
  int drawn_width_ = 0;    // the terminal's, when the bar was drawn last
  double quick_loss_ = 0;  // moving averages, over about 10 and 50 updates
  double slow_loss_ = 0;
  int num_losses_ = 0;
  bool finished_ = false;
};

// On a terminal, one line that is redrawn in place, at most ten times a second, and always fits:
//
//   step  340/1000  ━━━━━━━━╸━━━━━━━━   34%  loss 1.872 ↓  val 1.901  41.2k tok/s  left 1:52
//
// Elsewhere (a log file, CI, a launcher's pipe), a plain line now and then.
//
// Ownership: the caller keeps the descriptor, and keeps it open. Threading: any thread. Failure: a
// stream that takes no bytes for now (Ctrl-S, a slow reader) loses redraws and, later, notes; one
// that is closed or cannot be written to loses everything. Neither throws, and nothing ever waits
// for the stream, so that no rank is late because of a terminal.
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
  // Draws the final bar and moves the cursor to a new line. The destructor does it, too.
  void finish();

  // The errno of the write after which everything was lost: EPIPE where nobody reads the stream any
  // more, 0 where nothing was lost.
  int error() const;

 private:
  int width() const;
  void put(std::string_view text);

  mutable std::mutex mutex_;
  int fd_;
  int own_fd_ = -1;  // the same stream opened again, because others share its blocking mode
  int error_ = 0;
  int width_;
  std::string pending_;  // bytes that the stream has not taken yet
  ProgressDisplay display_;
};

}  // namespace lockstep::observe
