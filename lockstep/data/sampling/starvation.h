// How much of the steps' time goes into waiting for data.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep::data {

// Looks at the last steps only, so that a slow start is forgotten. Not thread-safe.
class StarvationMeter {
 public:
  // A step that took `whole`, `waited` of it for its data.
  void step(Clock::duration waited, Clock::duration whole);

  // The share of the last steps' time that was waited, 0 to 1; 0 before any step.
  double share() const;

  // Whether the user should hear of it: true once, when over enough steps the share is too large
  // and the time lost is worth a word.
  bool should_warn();

  static constexpr std::size_t least_steps = 20;
  static constexpr std::size_t most_steps = 50;  // that are looked at
  static constexpr double tolerated_share = 0.2;
  static constexpr std::chrono::milliseconds worth_a_word{100};

 private:
  struct Step {
    Clock::duration waited;
    Clock::duration whole;
  };

  Step sum() const;

  std::vector<Step> steps_;  // a ring once it is full
  std::size_t next_ = 0;
  bool warned_ = false;
};

}  // namespace lockstep::data
