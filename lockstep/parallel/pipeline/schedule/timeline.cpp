#include <lockstep/parallel/pipeline/schedule/timeline.h>

#include <algorithm>
#include <limits>

namespace lockstep::pipeline {

namespace {

double busy(const Timeline& timeline) {
  double sum = 0;
  for (const auto& spans : timeline.ranks)
    for (const Span& span : spans) sum += span.end - span.start;
  return sum;
}

// 0 where nothing takes any time.
double idle_share(const Timeline& timeline, double duration) {
  const double all = duration * static_cast<double>(timeline.ranks.size());
  return all > 0 ? 1 - busy(timeline) / all : 0;
}

}  // namespace

double Timeline::start() const {
  double first = std::numeric_limits<double>::infinity();
  for (const auto& spans : ranks)
    if (!spans.empty()) first = std::min(first, spans.front().start);
  return first == std::numeric_limits<double>::infinity() ? 0 : first;
}

double Timeline::end() const {
  double last = -std::numeric_limits<double>::infinity();
  for (const auto& spans : ranks)
    if (!spans.empty()) last = std::max(last, spans.back().end);
  return last == -std::numeric_limits<double>::infinity() ? 0 : last;
}

double bubble(const Timeline& timeline) { return idle_share(timeline, timeline.makespan()); }

double bubble_between_own_ends(const Timeline& timeline) {
  double longest = 0;
  for (const auto& spans : timeline.ranks)
    if (!spans.empty()) longest = std::max(longest, spans.back().end - spans.front().start);
  return idle_share(timeline, longest);
}

}  // namespace lockstep::pipeline
