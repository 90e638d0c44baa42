// Where the ticks of an axis are, and what they say.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::observe {

struct Tick {
  double value;
  std::string label;  // empty for a line of the grid without one
};

// A range of values, their ticks, and where a value is in it. The range is finite and has a length.
class Axis {
 public:
  enum class Scale : std::uint8_t { linear, logarithmic };

  // Whole numbers only, for steps.
  static Axis steps(double lowest, double highest);
  // A linear axis with some air around the values.
  static Axis linear(double lowest, double highest);
  // The same, by factors. The values are positive.
  static Axis logarithmic(double lowest, double highest);

  // 0 at the lower end, 1 at the upper.
  double position(double value) const;
  Scale scale() const { return scale_; }
  const std::vector<Tick>& ticks() const { return ticks_; }

 private:
  Axis(Scale scale, double lowest, double highest);
  void add_round_ticks(double spacing);
  void add_power_ticks();

  Scale scale_;
  double lowest_;
  double highest_;
  std::vector<Tick> ticks_;
};

}  // namespace lockstep::observe
