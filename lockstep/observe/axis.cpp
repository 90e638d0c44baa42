#include <lockstep/observe/axis.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <spdlog/fmt/fmt.h>

namespace lockstep::observe {

namespace {

constexpr double kMostIntervals = 8;

// Of 1, 2, 2.5 and 5 times a power of ten, the least that needs no more intervals than there may
// be.
double round_spacing(double range) {
  const double least = range / kMostIntervals;
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

// Digits after the point that tell multiples of `spacing` apart.
int decimals(double spacing) {
  int digits = 0;
  for (; digits < 12; ++digits) {
    const double scaled = spacing * std::pow(10.0, digits);
    if (std::abs(scaled - std::round(scaled)) < 1e-6 * scaled) break;
  }
  return digits;
}

std::string label_of(double value, double spacing, double largest) {
  struct Unit {
    double size;
    const char* name;
  };
  if (largest >= 1e15 || spacing < 1e-6) return fmt::format("{:.4g}", value);
  for (const Unit& unit : {Unit{1e12, "T"}, Unit{1e9, "G"}, Unit{1e6, "M"}, Unit{1e3, "k"}}) {
    // Thousands are read well enough up to ten of them, and 0 needs no unit.
    if (largest < unit.size * (unit.size == 1e3 ? 10 : 1) || value == 0) continue;
    return fmt::format("{:.{}f}{}", value / unit.size, decimals(spacing / unit.size), unit.name);
  }
  return fmt::format("{:.{}f}", value, decimals(spacing));
}

}  // namespace

Axis::Axis(Scale scale, double lowest, double highest)
    : scale_(scale), lowest_(lowest), highest_(highest) {}

void Axis::add_round_ticks(double spacing) {
  const double largest = std::max(std::abs(lowest_), std::abs(highest_));
  // A count, not a sum of spacings, so that errors do not add up.
  const double slack = 1e-9 * (highest_ - lowest_);
  for (double i = std::ceil((lowest_ - slack) / spacing); i * spacing <= highest_ + slack; ++i) {
    const double value = i == 0 ? 0 : std::clamp(i * spacing, lowest_, highest_);
    ticks_.push_back({value, label_of(value, spacing, largest)});
  }
}

Axis Axis::steps(double lowest, double highest) {
  if (highest - lowest < 1) {
    lowest -= 1;
    highest += 1;
  }
  Axis axis(Scale::linear, lowest, highest);
  axis.add_round_ticks(std::max(1.0, round_spacing(highest - lowest)));
  return axis;
}

Axis Axis::linear(double lowest, double highest) {
  // Of sizes below, the differences would drown in rounding.
  const double size = std::max(std::abs(lowest), std::abs(highest));
  double air = std::max(0.06 * (highest - lowest), 1e-6 * size);
  if (highest == lowest) air = size > 0 ? 0.1 * size : 1.0;
  constexpr double kLargest = std::numeric_limits<double>::max() / 8;
  Axis axis(Scale::linear, std::max(lowest - air, -kLargest), std::min(highest + air, kLargest));
  // Losses that come near 0 are measured from 0.
  if (lowest >= 0 && axis.lowest_ < 0.15 * highest && highest > lowest) axis.lowest_ = 0;
  axis.add_round_ticks(round_spacing(axis.highest_ - axis.lowest_));
  return axis;
}

Axis Axis::logarithmic(double lowest, double highest) {
  const double air = std::max(0.06 * std::log(highest / lowest), 0.01);
  Axis axis(Scale::logarithmic, lowest * std::exp(-air), highest * std::exp(air));
  axis.add_power_ticks();
  return axis;
}

void Axis::add_power_ticks() {
  const double first = std::floor(std::log10(lowest_));
  const double last = std::ceil(std::log10(highest_));
  const double every = std::max(1.0, std::ceil((last - first) / kMostIntervals));
  for (double power = first; power <= last; ++power) {
    for (int factor = 1; factor < 10; ++factor) {
      const double value = factor * std::pow(10.0, power);
      if (value < lowest_ || value > highest_) continue;
      // Over many powers of ten, lines between them would be a grey wall.
      if (every > 1 && (factor != 1 || std::fmod(power - first, every) != 0)) continue;
      const bool labelled = factor == 1 || (last - first <= 4 && (factor == 2 || factor == 5));
      ticks_.push_back({value, labelled ? fmt::format("{:g}", value) : ""});
    }
  }
}

double Axis::position(double value) const {
  const double at = scale_ == Scale::linear
                        ? (value - lowest_) / (highest_ - lowest_)
                        : std::log(value / lowest_) / std::log(highest_ / lowest_);
  return std::clamp(at, 0.0, 1.0);
}

}  // namespace lockstep::observe
