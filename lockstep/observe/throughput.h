// How fast something goes, lately.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>

#include <lockstep/base/deadline.h>

namespace lockstep::observe {

// A moving rate: amounts and the time they took fade alike, by 1/e in `memory`, and the rate is
// their ratio. So it is exact from the first amount on where the rate is constant, and follows a
// change within the memory. Time points are passed in. Threading: one thread. Failure: none.
class Throughput {
 public:
  explicit Throughput(std::chrono::duration<double> memory) : memory_(memory) {}

  // From here on time counts; what came before is kept, so that a pause can be left out.
  void start(Clock::time_point now) { last_ = now; }

  // `amount` was done since start() or the last add().
  void add(double amount, Clock::time_point now) {
    const std::chrono::duration<double> span = std::max(now - last_, Clock::duration::zero());
    last_ = now;
    const double fade = std::exp(-span / memory_);
    amount_ = amount_ * fade + amount;
    seconds_ = seconds_ * fade + span.count();
  }

  // 0 where nothing is known yet.
  double per_second() const { return seconds_ > 0 ? amount_ / seconds_ : 0; }

 private:
  std::chrono::duration<double> memory_;
  Clock::time_point last_;
  double amount_ = 0;
  double seconds_ = 0;
};

}  // namespace lockstep::observe
