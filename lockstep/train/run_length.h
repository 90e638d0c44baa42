// How many steps a run has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

namespace lockstep::train {

// Whichever ends first; at least one is given.
struct RunLength {
  std::optional<std::int64_t> max_steps;
  std::optional<std::int64_t> epochs;

  // How far a run is.
  struct Place {
    std::int64_t steps_done = 0;
    std::int64_t epoch = 0;
    std::int64_t steps_left = 0;  // of that epoch
  };

  // Of a whole run; where that is more than can be counted, the most that can.
  std::int64_t total_steps(std::int64_t steps_per_epoch) const {
    return total_steps(steps_per_epoch, {.steps_left = steps_per_epoch});
  }

  // Of one that has come so far, perhaps with batches of another size: what is done, and what is
  // left.
  std::int64_t total_steps(std::int64_t steps_per_epoch, const Place& place) const {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    std::int64_t total = kMost;
    if (epochs) {
      total = place.steps_done;
      const std::int64_t more = *epochs - place.epoch - 1;  // whole ones
      if (more > (kMost - total - place.steps_left) / steps_per_epoch)
        total = kMost;
      else if (more >= 0)
        total += place.steps_left + more * steps_per_epoch;
    }
    return std::min(total, std::max(max_steps.value_or(kMost), place.steps_done));
  }
};

}  // namespace lockstep::train
