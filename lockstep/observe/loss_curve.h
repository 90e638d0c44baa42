// The picture of a training run: loss over steps.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lockstep::observe {

struct Point {
  std::int64_t step = 0;
  double value = 0;  // NaN and infinity are gaps

  bool operator==(const Point&) const = default;
};

// Sorts by step. If a step has several points, the last one stays.
std::vector<Point> in_order(std::vector<Point> points);

// The runs of points between gaps. None is empty.
std::vector<std::span<const Point>> without_gaps(std::span<const Point> points);

// A running mean over up to `reach` points on either side, taken twice, so that a spike becomes a
// hill and not a step. Within `reach` of an end it is the straight line that fits the points there
// best: the mean of one side alone would lag where the loss falls fast. The points must be finite.
std::vector<Point> smooth(std::span<const Point> points, std::size_t reach);

// At most `most` of the points (at least 4), the first, the last and every spike that could be seen
// among them: the lowest and the highest of each stretch of steps.
std::vector<Point> thin_out(std::span<const Point> points, std::size_t most);

struct LossCurve {
  struct Reference {
    std::string label;  // "unigram entropy"
    double value = 0;
  };

  std::string title = "Training loss";
  std::string subtitle;  // such as "GPT, 2.7 M parameters, 2 ranks"
  std::vector<Point> training;
  std::vector<Point> validation;
  std::optional<Reference> reference;  // a horizontal line
};

// The columns loss and validation_loss of a metrics.csv. UsageError where the file is missing, is
// not one of ours, or has neither column.
LossCurve read_loss_curve(const std::filesystem::path& metrics_csv);

// A self-contained SVG document with its own background, and at most a few thousand points however
// long the run is. Training loss is a faint line with a smoothed one on top,
// validation loss a line with its points. The vertical axis is logarithmic where losses span more
// than a factor of 30. NaN and infinity are gaps; steps need not be in order.
std::string draw_svg(const LossCurve& curve);

}  // namespace lockstep::observe
