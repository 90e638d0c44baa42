#include <lockstep/observe/series.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace lockstep::observe {

std::vector<Point> in_order(std::vector<Point> points) {
  std::ranges::stable_sort(points, {}, &Point::step);
  // From behind, so that the last of equals stays.
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

// Puts the line that fits values[first, first + count) best in place of them in `means`, from
// `begin` up to `end`.
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
  // The ends, and two of each stretch between them.
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

}  // namespace lockstep::observe
