#include <lockstep/observe/loss_curve.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>

#include <lockstep/base/error.h>
#include <lockstep/observe/csv_file.h>
#include <lockstep/observe/svg.h>

namespace lockstep::observe {

std::vector<Point> in_order(std::vector<Point> points) {
  std::ranges::stable_sort(points, {}, &Point::step);
  // From the back, so that the last of equal steps stays.
  const auto kept = std::unique(points.rbegin(), points.rend(),
                                [](const Point& a, const Point& b) { return a.step == b.step; });
  points.erase(points.begin(), kept.base());
  return points;
}

std::vector<std::span<const Point>> without_gaps(std::span<const Point> points) {
  std::vector<std::span<const Point>> runs;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= points.size(); ++i) {
    if (i < points.size() && std::isfinite(points[i].value)) continue;
    if (i > begin) runs.push_back(points.subspan(begin, i - begin));
    begin = i + 1;
  }
  return runs;
}

namespace {

// Writes the straight line that fits values[first, first + count) best to means[begin, end).
void fit_line(std::span<const double> values, std::span<double> means, std::size_t first,
              std::size_t count, std::size_t begin, std::size_t end) {
  const double middle = static_cast<double>(count - 1) / 2;
  double mean = 0;
  for (std::size_t i = 0; i < count; ++i) mean += values[first + i] / static_cast<double>(count);
  double covariance = 0;
  double variance = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double offset = static_cast<double>(i) - middle;
    covariance += offset * (values[first + i] - mean);
    variance += offset * offset;
  }
  const double slope = variance > 0 ? covariance / variance : 0;
  for (std::size_t i = begin; i < end; ++i)
    means[i] = mean + slope * (static_cast<double>(i - first) - middle);
}

std::vector<double> running_mean(const std::vector<double>& values, std::size_t reach) {
  const std::size_t size = values.size();
  const std::size_t count = 2 * reach + 1;
  std::vector<double> means(size);
  double sum = 0;
  for (std::size_t end = 0; end < size; ++end) {
    sum += values[end];
    if (end + 1 < count) continue;
    means[end - reach] = sum / static_cast<double>(count);
    sum -= values[end + 1 - count];
  }
  fit_line(values, means, 0, count, 0, reach);
  fit_line(values, means, size - count, count, size - reach, size);
  return means;
}

}  // namespace

std::vector<Point> smooth(std::span<const Point> points, std::size_t reach) {
  std::vector<Point> smoothed(points.begin(), points.end());
  if (points.empty()) return smoothed;
  std::vector<double> values;
  values.reserve(points.size());
  std::ranges::transform(points, std::back_inserter(values), &Point::value);
  reach = std::min(reach, (values.size() - 1) / 2);
  values = running_mean(running_mean(values, reach), reach);
  for (std::size_t i = 0; i < values.size(); ++i) smoothed[i].value = values[i];
  return smoothed;
}

std::vector<Point> thin_out(std::span<const Point> points, std::size_t most) {
  if (points.size() <= most) return {points.begin(), points.end()};
  // Two points are the ends, and two are of each stretch between them.
  const std::size_t num_stretches = (most - 2) / 2;
  const auto inner = points.subspan(1, points.size() - 2);
  const auto first_step = static_cast<double>(inner.front().step);
  const double per_step = static_cast<double>(num_stretches) /
                          (static_cast<double>(inner.back().step) - first_step + 1);
  std::vector<Point> kept = {points.front()};
  for (auto begin = inner.begin(); begin != inner.end();) {
    const auto stretch_of = [&](const Point& point) {
      return std::floor((static_cast<double>(point.step) - first_step) * per_step);
    };
    const double stretch = stretch_of(*begin);
    const auto end = std::find_if(begin, inner.end(),
                                  [&](const Point& point) { return stretch_of(point) != stretch; });
    const auto [lowest, highest] = std::minmax_element(
        begin, end, [](const Point& a, const Point& b) { return a.value < b.value; });
    kept.push_back(*std::min(lowest, highest));
    if (lowest != highest) kept.push_back(*std::max(lowest, highest));
    begin = end;
  }
  kept.push_back(points.back());
  return kept;
}

namespace {

constexpr Box kPlot = {.left = 76, .top = 104, .right = 932, .bottom = 484};
constexpr double kWidth = 960;
constexpr double kHeight = 540;
constexpr std::size_t kMostPoints = 1000;
constexpr std::size_t kFewestToSmooth = 24;  // fewer points are drawn as they are
constexpr std::size_t kMostDots = 60;        // more would be a thick line
constexpr double kLogarithmicFrom = 30;
// Values up to this size can be added and subtracted without overflow, and divided where they are
// above its inverse. Larger losses are treated as infinite.
constexpr double kLargest = 1e100;

constexpr std::string_view kInk = "#1f2933";
constexpr std::string_view kSoftInk = "#5b6774";
constexpr std::string_view kGrid = "#e6e9ee";
constexpr std::string_view kTraining = "#2563eb";
constexpr std::string_view kFaintTraining = "#a9c3f7";
constexpr std::string_view kValidation = "#e4572e";

struct Range {
  double lowest = std::numeric_limits<double>::infinity();
  double highest = -std::numeric_limits<double>::infinity();

  void take(double value) {
    if (!std::isfinite(value)) return;
    lowest = std::min(lowest, value);
    highest = std::max(highest, value);
  }
  bool empty() const { return lowest > highest; }
};

struct Axes {
  Axis x;
  Axis y;

  double left(double step) const {
    return kPlot.left + x.position(step) * (kPlot.right - kPlot.left);
  }
  double top(double value) const {
    return kPlot.bottom - y.position(value) * (kPlot.bottom - kPlot.top);
  }
};

// The points in order. Values that cannot be drawn become NaN.
std::vector<Point> drawable(const std::vector<Point>& points) {
  auto ordered = in_order(points);
  for (auto& point : ordered) {
    if (!(std::abs(point.value) <= kLargest))
      point.value = std::numeric_limits<double>::quiet_NaN();
  }
  return ordered;
}

Axes make_axes(std::span<const Point> training, std::span<const Point> validation,
               std::optional<double> reference) {
  Range steps;
  Range losses;
  for (const auto points : {training, validation}) {
    for (const auto& point : points) {
      if (!std::isfinite(point.value)) continue;
      steps.take(static_cast<double>(point.step));
      losses.take(point.value);
    }
  }
  if (steps.empty()) {
    steps = {0, 1};
    losses = {0, 1};
  }
  // The losses alone decide on the scale, not a reference that is far from them.
  const bool logarithmic =
      losses.lowest >= 1 / kLargest && losses.highest / losses.lowest > kLogarithmicFrom;
  if (reference && (!logarithmic || *reference >= 1 / kLargest)) losses.take(*reference);
  // A run from step 1 on starts at 0, where the axis does.
  if (steps.lowest > 0 && steps.lowest < 0.05 * steps.highest) steps.lowest = 0;
  return {.x = Axis::steps(steps.lowest, steps.highest),
          .y = logarithmic ? Axis::logarithmic(losses.lowest, losses.highest)
                           : Axis::linear(losses.lowest, losses.highest)};
}

void draw_grid(SvgWriter& svg, const Axes& axes) {
  for (const auto& tick : axes.y.ticks()) {
    const double y = axes.top(tick.value);
    svg.line({kPlot.left, y}, {kPlot.right, y}, {.colour = kGrid, .width = 1});
    svg.text({kPlot.left - 10, y + 4.5}, tick.label,
             {.colour = kSoftInk, .size = 13, .anchor = Anchor::end});
  }
  for (const auto& tick : axes.x.ticks()) {
    const double x = axes.left(tick.value);
    svg.line({x, kPlot.top}, {x, kPlot.bottom}, {.colour = kGrid, .width = 1});
    svg.text({x, kPlot.bottom + 21}, tick.label,
             {.colour = kSoftInk, .size = 13, .anchor = Anchor::middle});
  }
  svg.line({kPlot.left, kPlot.bottom}, {kPlot.right, kPlot.bottom},
           {.colour = kSoftInk, .width = 1.2});
  svg.text({(kPlot.left + kPlot.right) / 2, kPlot.bottom + 45}, "step",
           {.colour = kInk, .size = 14, .anchor = Anchor::middle});
  const bool logarithmic = axes.y.scale() == Axis::Scale::logarithmic;
  svg.text_upwards({24, (kPlot.top + kPlot.bottom) / 2},
                   logarithmic ? "loss (logarithmic)" : "loss",
                   {.colour = kInk, .size = 14, .anchor = Anchor::middle});
}

// How many points may be drawn of a run that has `points` of `all`.
std::size_t share(std::size_t points, std::size_t all) {
  return std::max<std::size_t>(4, kMostPoints * points / std::max<std::size_t>(all, 1));
}

// On a logarithmic axis the logarithms are averaged, so that a spike counts by its drawn height.
std::vector<Point> smooth_on(const Axis& axis, std::span<const Point> points, std::size_t reach) {
  if (axis.scale() == Axis::Scale::linear) return smooth(points, reach);
  std::vector<Point> logarithms(points.begin(), points.end());
  for (auto& point : logarithms) point.value = std::log(point.value);
  auto smoothed = smooth(logarithms, reach);
  for (auto& point : smoothed) point.value = std::exp(point.value);
  return smoothed;
}

// Returns the last point that was drawn, where there is one.
std::vector<Point> draw_series(SvgWriter& svg, const Axes& axes, std::span<const Point> points,
                               const Stroke& stroke, std::size_t reach) {
  std::vector<Point> last;
  for (const auto run : without_gaps(points)) {
    const auto drawn = thin_out(smooth_on(axes.y, run, reach), share(run.size(), points.size()));
    last = {drawn.back()};
    std::vector<Position> path;
    path.reserve(drawn.size());
    for (const auto& point : drawn)
      path.push_back({axes.left(static_cast<double>(point.step)), axes.top(point.value)});
    svg.polyline(path, stroke);
  }
  return last;
}

struct LegendEntry {
  std::string label;
  Stroke stroke;
  bool dot = false;
};

// The name for the legend, with the last value where there is one.
std::string with_last(std::string_view name, std::span<const Point> points) {
  if (points.empty()) return std::string(name);
  return fmt::format("{} {:.4g}", name, points.back().value);
}

void draw_legend(SvgWriter& svg, std::span<const LegendEntry> entries) {
  double x = kPlot.left;
  const double y = kPlot.top - 22;
  for (const auto& entry : entries) {
    svg.line({x, y - 4.5}, {x + 26, y - 4.5}, entry.stroke);
    if (entry.dot) svg.dot({x + 13, y - 4.5}, 3.5, entry.stroke.colour);
    const auto label = shortened(entry.label, 13, kPlot.right - x - 34);
    svg.text({x + 34, y}, label, {.colour = kInk, .size = 13});
    x += 34 + estimated_width(label, 13) + 24;
  }
}

}  // namespace

LossCurve read_loss_curve(const std::filesystem::path& metrics_csv) {
  const CsvTable table(metrics_csv);
  const auto training = table.column("loss");
  const auto validation = table.column("validation_loss");
  if (!training && !validation)
    throw UsageError("'{}' has neither a column 'loss' nor 'validation_loss': there is no curve to "
                     "draw",
                     metrics_csv.string());
  LossCurve curve;
  for (const auto& row : table.rows()) {
    const auto take = [&](std::optional<std::size_t> column, std::vector<Point>& points) {
      const auto value = column ? CsvTable::value(row, *column) : std::nullopt;
      if (value) points.push_back({row.step, *value});
    };
    take(training, curve.training);
    take(validation, curve.validation);
  }
  return curve;
}

std::string draw_svg(const LossCurve& curve) {
  const auto training = drawable(curve.training);
  const auto validation = drawable(curve.validation);
  std::optional<double> reference;
  if (curve.reference && std::abs(curve.reference->value) <= kLargest)
    reference = curve.reference->value;
  const Axes axes = make_axes(training, validation, reference);
  std::vector<LegendEntry> legend;

  SvgWriter svg(kWidth, kHeight, "#ffffff");
  const double room = kPlot.right - kPlot.left;
  svg.text({kPlot.left, curve.subtitle.empty() ? 50.0 : 38.0}, shortened(curve.title, 20, room),
           {.colour = kInk, .size = 20, .weight = Weight::bold});
  svg.text({kPlot.left, 60}, shortened(curve.subtitle, 14, room), {.colour = kSoftInk, .size = 14});
  draw_grid(svg, axes);

  if (reference) {
    const Stroke stroke = {.colour = kSoftInk, .width = 1.5, .dashes = "6 5"};
    const double y = axes.top(*reference);
    svg.line({kPlot.left, y}, {kPlot.right, y}, stroke);
    legend.push_back({fmt::format("{} {:.4g}", curve.reference->label, *reference), stroke});
  }
  if (!training.empty()) {
    const Stroke strong = {.colour = kTraining, .width = 2.25};
    const bool smoothed = training.size() >= kFewestToSmooth;
    if (smoothed)
      draw_series(svg, axes, training, {.colour = kFaintTraining, .width = 1}, /*reach=*/0);
    const std::size_t reach = smoothed ? std::max<std::size_t>(2, training.size() / 100) : 0;
    const auto last = draw_series(svg, axes, training, strong, reach);
    legend.insert(legend.begin(), {with_last("training", last), strong});
  }
  if (!validation.empty()) {
    const Stroke stroke = {.colour = kValidation, .width = 2};
    const auto last = draw_series(svg, axes, validation, stroke, /*reach=*/0);
    const bool dots = validation.size() <= kMostDots;
    for (const auto& point : validation) {
      if (dots && std::isfinite(point.value))
        svg.dot({axes.left(static_cast<double>(point.step)), axes.top(point.value)}, 3.5,
                kValidation);
    }
    legend.insert(legend.begin() + (training.empty() ? 0 : 1),
                  {with_last("validation", last), stroke, dots});
  }
  draw_legend(svg, legend);
  return svg.document();
}

}  // namespace lockstep::observe
