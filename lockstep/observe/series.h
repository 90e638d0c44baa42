// Values over steps, made ready to be drawn.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::observe {

struct Point {
  std::int64_t step = 0;
  double value = 0;  // NaN and infinity are gaps

  bool operator==(const Point&) const = default;
};

// Sorted by step; of several points of one step, the last.
std::vector<Point> in_order(std::vector<Point> points);

// Runs of points between gaps, none empty.
std::vector<std::span<const Point>> without_gaps(std::span<const Point> points);

// A running mean over up to `reach` points on either side, taken twice, so that a spike becomes a
// hill and not a step. Within `reach` of an end it is the line that fits the points there best: the
// mean of one side alone would lag where the loss falls fast. The points must be finite.
std::vector<Point> smooth(std::span<const Point> points, std::size_t reach);

// At most `most` of the points (at least 4), the first, the last and every spike that could be seen
// among them: the lowest and the highest of each stretch of steps.
std::vector<Point> thin_out(std::span<const Point> points, std::size_t most);

}  // namespace lockstep::observe
