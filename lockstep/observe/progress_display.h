// What to write when a run gets further: a bar that is redrawn in place, or lines for a log.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <lockstep/base/deadline.h>
#include <lockstep/observe/progress.h>
#include <lockstep/observe/throughput.h>

namespace lockstep::observe {

enum class DisplayKind : std::uint8_t { live, plain };

// Turns progress into bytes for a terminal or a log; whoever owns the stream writes them, whole and
// in order. A live bar leaves the cursor at the start of its line: what it draws next erases all
// of it even where the terminal became narrower and broke the line into several.
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
    // A log gets the first step, the last, and one whenever as much time has passed, or as many
    // steps where that is not 0.
    milliseconds plain_interval{10'000};
    std::int64_t plain_every_steps = 0;
  };

  ProgressDisplay(Options options, Clock::time_point start);

  // Each returns what is to be written, which may be nothing.
  std::string update(const Progress& progress, int width, Clock::time_point now);
  // Lines above the bar.
  std::string note(std::string_view text, int width);
  // The bar as it is in the end, and a new line. Once is enough.
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
  int drawn_width_ = 0;    // of the terminal when the bar was drawn last
  double quick_loss_ = 0;  // moving averages, over about 10 and 50 updates
  double slow_loss_ = 0;
  int num_losses_ = 0;
  bool finished_ = false;
};

}  // namespace lockstep::observe
