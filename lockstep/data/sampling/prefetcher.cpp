#include <lockstep/data/sampling/prefetcher.h>

namespace lockstep::data {

void StarvationMeter::step(Clock::duration waited, Clock::duration whole) {
  if (steps_.size() < most_steps) {
    steps_.push_back({waited, whole});
    return;
  }
  steps_[next_] = {waited, whole};
  next_ = (next_ + 1) % most_steps;
}

StarvationMeter::Step StarvationMeter::sum() const {
  Step sum{};
  for (const Step& step : steps_) {
    sum.waited += step.waited;
    sum.whole += step.whole;
  }
  return sum;
}

double StarvationMeter::share() const {
  const auto [waited, whole] = sum();
  if (whole <= Clock::duration::zero()) return 0;
  return std::chrono::duration<double>(waited) / std::chrono::duration<double>(whole);
}

bool StarvationMeter::should_warn() {
  if (warned_ || steps_.size() < least_steps) return false;
  warned_ = share() > tolerated_share && sum().waited >= worth_a_word;
  return warned_;
}

}  // namespace lockstep::data
