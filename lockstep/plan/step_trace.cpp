#include <lockstep/plan/step_trace.h>

#include <algorithm>

namespace lockstep::plan {

std::int64_t StepTrace::peak_bytes() const {
  std::int64_t peak = peak_bytes_after;
  for (const Event& event : events) peak = std::max(peak, event.peak_bytes);
  return peak;
}

}  // namespace lockstep::plan
