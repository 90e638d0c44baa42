#include <lockstep/parallel/pipeline/schedule/live_forwards.h>

#include <algorithm>

namespace lockstep::pipeline {

std::vector<LiveForwards> live_forwards(const Schedule& schedule) {
  std::vector<LiveForwards> peaks;
  for (const auto& actions : schedule.actions) {
    LiveForwards now;
    LiveForwards peak;
    for (const Action& action : actions) {
      const bool whole = action.kind == ActionKind::backward;
      if (action.kind == ActionKind::forward) {
        ++now.until_input;
        ++now.until_weight;
      }
      if (whole || action.kind == ActionKind::backward_input) --now.until_input;
      if (whole || action.kind == ActionKind::backward_weight) --now.until_weight;
      peak.until_input = std::max(peak.until_input, now.until_input);
      peak.until_weight = std::max(peak.until_weight, now.until_weight);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace lockstep::pipeline
