// How far a run is, as one line of text.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include <lockstep/observe/terminal.h>

namespace lockstep::observe {

struct Progress {
  std::int64_t step = 0;  // steps that are done
  double loss = std::numeric_limits<double>::quiet_NaN();
  std::optional<double> validation_loss;  // the latest one
  double rate = 0;                        // tokens or samples a second; 0 where it is not known
  std::optional<double> share_of_peak;    // what the devices compute, of what they could at most
  std::optional<double> memory_bytes;     // the most that tensors took on the device so far
  // Where not given, the bar's own estimate, from how fast steps came lately.
  std::optional<double> seconds_left;
};

enum class Trend : std::uint8_t { unknown, falling, rising };

// What a line says beyond Progress.
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

// A line with a bar for a terminal: at most width - 1 columns, so that no terminal wraps it. What
// does not fit is left out, the least important first.
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

}  // namespace lockstep::observe
